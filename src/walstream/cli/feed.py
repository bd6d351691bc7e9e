"""`walstream feed`: serves the log to subscribers, and is a subscriber.

What needs the extra is imported only when it is used, so that the other commands start without it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from walstream import logs
from walstream.cli import moments
from walstream.cli.feed_address import FeedAddress, quieten
from walstream.cli.interrupt import Interrupt
from walstream.cli.options import Sources, command
from walstream.cli.output import Column, Output, plural
from walstream.errors import UnreachableError, UsageError
from walstream.positions import GlobalLsn

if TYPE_CHECKING:
    from walstream.feed import Client, Entry, Subscription
    from walstream.feed.client import Framing, Start

app = typer.Typer(help="Stream the log to subscribers over gRPC, and subscribe.", no_args_is_help=True)

ACK_INTERVAL_S: Final = 1.0

QUIET_ACK_INTERVAL_S: Final = 30.0
"""How often is acknowledged that there was nothing to print."""

PLACES: Final = "oldest, head, acked (where --subscriber-id stands), an LSN, a time, or a while ago (15m)"

_POSITIONS = (
    Column("head_lsn", "head"),
    Column("head_time_ms", "… appended", "time"),
    Column("oldest_lsn", "oldest"),
    Column("oldest_time_ms", "… appended", "time"),
    Column("resolved_lsn", "resolved"),
    Column("watermark_lsn", "watermark"),
)


@command(app, "serve")
def serve(
    sources: Sources,
    host: Annotated[str | None, typer.Option(help="Address to listen at (feed.host).")] = None,
    port: Annotated[str | None, typer.Option(metavar="NUMBER", help="Port to listen at (feed.port).")] = None,
    http_listen: Annotated[str | None, typer.Option(help="Address of health and metrics (feed.http_listen).")] = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; the first tells every subscriber where to resume, the second stops at once."""
    loaded = sources.load({"feed.host": host, "feed.port": port, "feed.http_listen": http_listen})
    logs.set_up(loaded.config.node.log_level, loaded.config.node.log_format)
    quieten()
    # Only here, so that the other commands start without the server.
    from walstream.feed.service.server import run

    raise typer.Exit(run(loaded.config))


@command(app, "subscribe")
def subscribe(
    feed: FeedAddress,
    output: Output,
    begin: Annotated[str, typer.Option("--from", metavar="PLACE", help=f"Where to begin: {PLACES}.")] = "head",
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f", help="Wait for the entries to come.")] = True,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="Stop after this many entries.")] = None,
    tenant: Annotated[str, typer.Option(help="Only this tenant's. Without: those that the token may read.")] = "",
    topics: Annotated[
        list[str] | None, typer.Option("--topic", "-t", help="Only this topic; `*` stands for any text; repeatable.")
    ] = None,
    key_prefix: Annotated[str, typer.Option(help="Only keys that begin so, as `cluster:tenant:topic:key`.")] = "",
    framing: Annotated[
        str,
        typer.Option(help="`records`: each change; `transactions`: each transaction whole, in commit order."),
    ] = "records",
    capture: Annotated[str, typer.Option(help="Of transactions: the prefix of the capture.")] = "",
    subscriber_id: Annotated[str, typer.Option(help="Whose acknowledgements count; else the token's subject.")] = "",
    ack: Annotated[bool, typer.Option("--ack", help="Acknowledge what was printed, every second.")] = False,
) -> None:
    """Print entries as they come, one a line. Resumes by itself while the feed is away; ends with Ctrl-C."""
    show = _printer(output)
    with feed.client() as client, Interrupt() as interrupt:
        begun_at = _start(client, begin, _framing(framing), capture)
        end = None if follow else client.lsn(_framing(framing), capture).head
        stream = client.subscribe(
            begun_at,
            tenant=tenant,
            topics=topics or (),
            key_prefix=key_prefix,
            framing=_framing(framing),
            capture=capture,
            subscriber_id=subscriber_id,
        )
        acking = _Acking(client, subscriber_id) if ack else None
        shown = _print(stream, interrupt, show, acking, count, end)
    if output.is_for_people and sys.stderr.isatty():
        output.note(f"{plural(shown, 'entry').replace('entrys', 'entries')}.")


def _print(
    stream: Subscription,
    interrupt: Interrupt,
    show: Callable[[Entry], None],
    acking: _Acking | None,
    count: int | None,
    end: int | None,
) -> int:
    """Print until there is a reason to stop, and return how many were printed."""
    from walstream.feed import Batch, Heartbeat

    shown = 0
    with stream:
        if end == 0:
            return 0
        for event in interrupt.until(stream.events()):
            for entry in event.entries if isinstance(event, Batch) else ():
                if end is not None and entry.lsn > end:
                    break
                show(entry)
                shown += 1
                if acking is not None:
                    acking.note(entry.lsn)
                if shown == count:
                    break
            sys.stdout.flush()
            if acking is not None:
                if isinstance(event, Heartbeat):
                    acking.note_quiet(event.resolved)
                acking.flush(is_over=False)
            if shown == count or (end is not None and stream.resume > end):
                break
        if acking is not None:
            acking.flush(is_over=True)
    return shown


class _Acking:
    """Acknowledges what was printed, not more often than every second, and at the end.

    While nothing is to be printed it acknowledges, more rarely, how far the stream has come: otherwise a feed that was
    started again could not know whether something was sent and is not processed yet, and would keep it.
    """

    def __init__(self, client: Client, subscriber_id: str) -> None:
        self._client = client
        self._subscriber_id = subscriber_id
        self._lsn: GlobalLsn | None = None
        self._last = time.monotonic()
        self._next = self._last + ACK_INTERVAL_S

    def note(self, lsn: GlobalLsn) -> None:
        """Hear that an entry was printed."""
        self._lsn = lsn
        self._next = min(self._next, self._last + ACK_INTERVAL_S)

    def note_quiet(self, resolved: GlobalLsn) -> None:
        """Hear that everything up to here has come, and therefore was printed."""
        if resolved:
            self._lsn = resolved

    def flush(self, *, is_over: bool) -> None:
        """Acknowledge if it is time."""
        if self._lsn is None or not (is_over or time.monotonic() >= self._next):
            return
        try:
            self._client.ack(self._lsn, self._subscriber_id)
        except UnreachableError:
            if is_over:
                raise
            # The stream resumes by itself, and this with it.
            return
        self._lsn, self._last = None, time.monotonic()
        self._next = self._last + QUIET_ACK_INTERVAL_S


def _framing(text: str) -> Framing:
    match text:
        case "records":
            return "records"
        case "transactions":
            return "transactions"
    raise UsageError(f"--framing {text!r} is none.", "There are records and transactions.")


def _start(client: Client, text: str, framing: Framing, capture: str) -> Start:
    word = text.strip().lower()
    if word in ("oldest", "head"):
        return word
    if word == "acked":
        return None
    if "." in word and len(word) == len(str(GlobalLsn(0))):
        return GlobalLsn.parse(word)
    place = moments.parse(text, datetime.now(UTC))
    match place.kind:
        case "beginning":
            return "oldest"
        case "end":
            return "head"
        case "time":
            # What is there since then: what has been removed was not asked for by its LSN.
            return max(GlobalLsn.at_time(place.value), client.lsn(framing, capture).oldest)
    raise UsageError(f"{text!r} is no place in the feed.", f"Write {PLACES}.")


@command(app, "lsn")
def lsn(
    feed: FeedAddress,
    output: Output,
    framing: Annotated[str, typer.Option(help="Of `records`, or of `transactions`: they end elsewhere.")] = "records",
    capture: Annotated[str, typer.Option(help="Of transactions: the prefix of the capture.")] = "",
) -> None:
    """Tell where the log ends, from where on it is whole, and what all subscribers have acknowledged."""
    with feed.client() as client:
        found = client.lsn(_framing(framing), capture)
    output.item(
        {
            **{f"{name}_lsn": str(value) if value else "" for name, value in found._asdict().items()},
            **{f"{name}_time_ms": value.time_ms if value else None for name, value in found._asdict().items()},
        },
        _POSITIONS,
    )


@command(app, "ack")
def ack(
    feed: FeedAddress,
    output: Output,
    position: Annotated[str, typer.Argument(metavar="LSN", help="Everything up to this LSN is processed.")],
    subscriber_id: Annotated[str, typer.Option(help="Whose acknowledgement it is; else the token's subject.")] = "",
) -> None:
    """Acknowledge, durably. It never goes back: an earlier LSN changes nothing."""
    with feed.client() as client:
        answer = client.ack(position, subscriber_id)
    output.done(
        f"Acknowledged up to {answer.acked}; all active subscribers up to {answer.watermark}.",
        {"acked_lsn": str(answer.acked), "watermark_lsn": str(answer.watermark)},
    )


def _printer(output: Output) -> Callable[[Entry], None]:
    from walstream.cli import feed_lines

    if not output.is_for_people:
        return lambda entry: print(feed_lines.to_json(entry))
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return lambda entry: print(feed_lines.line(entry, is_coloured=is_coloured))

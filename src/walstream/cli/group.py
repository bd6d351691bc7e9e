"""`walstream group`: consumer groups, how far behind they are, and where they begin again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import ConsumerGroupDescription, OffsetSpec

from walstream.cli import moments
from walstream.cli.client import EARLIEST, LATEST, Client
from walstream.cli.options import Confirm, command, confirm_name
from walstream.cli.output import Column, Output, plural
from walstream.errors import GroupNotEmpty, GroupNotFound, UsageError

app = typer.Typer(help="List, describe and reset consumer groups.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group.")]
At = tuple[str, int]

_COLUMNS = (
    Column("topic", "topic"),
    Column("partition", "partition", "number"),
    Column("committed_offset", "committed", "number"),
    Column("end_offset", "end", "number"),
    Column("lag_records", "lag", "number"),
    Column("member", "member"),
    Column("host", "host"),
)


@command(app, "list")
def list_groups(client: Client, output: Output) -> None:
    """List the groups."""
    names = _names(client)
    rows = []
    for name in names:
        found = _describe(client, name)
        offsets = _committed(client, name)
        rows.append(
            {
                "group": name,
                "state": found.state.name.lower(),
                "members": len(found.members),
                "topics": sorted({topic for topic, _ in offsets}),
                "lag_records": sum(_lags(client, offsets).values()),
            }
        )
    columns = (
        Column("group", "group"),
        Column("state", "state", "state"),
        Column("members", "members", "number"),
        Column("lag_records", "lag", "number"),
        Column("topics", "topics"),
    )
    output.rows("groups", rows, columns, "There are no consumer groups.")


@command(app, "describe")
def describe(name: Name, client: Client, output: Output) -> None:
    """Show a group's partitions, how far it has read each, and its members."""
    _require(client, name)
    found = _describe(client, name)
    owners = {(at.topic, at.partition): member for member in found.members for at in member.assignment.topic_partitions}
    committed = _committed(client, name)
    bounds = client.bounds(sorted({*committed, *owners}))
    rows: list[dict[str, Any]] = []
    for (topic, index), (start, end) in bounds.items():
        offset, member = committed.get((topic, index)), owners.get((topic, index))
        rows.append(
            {
                "topic": topic,
                "partition": index,
                "committed_offset": offset,
                "end_offset": end,
                "lag_records": end - (start if offset is None else max(offset, start)),
                "member": member.member_id if member else None,
                "client": member.client_id if member else None,
                "host": member.host if member else None,
            }
        )
    state = found.state.name.lower()
    if not output.is_for_people:
        output.item({"group": name, "state": state, "members": len(found.members), "partitions": rows}, ())
        return
    lag = sum(row["lag_records"] for row in rows)
    output.note(
        f"Group {name} is {state}, has {plural(len(found.members), 'member')} and lags {plural(lag, 'record')}."
    )
    output.rows("partitions", rows, _COLUMNS, "It has committed no offsets.")


@command(app, "reset")
def reset(
    name: Name,
    client: Client,
    output: Output,
    to: Annotated[str, typer.Option("--to", metavar="PLACE", help=f"Where to begin again: {moments.PLACES}.")],
    topics: Annotated[
        list[str] | None, typer.Option("--topic", metavar="TOPIC", help="Only this topic; repeatable.")
    ] = None,
    confirm: Confirm = None,
) -> None:
    """Move the offsets of a group that has no members."""
    place = moments.parse(to, datetime.now(UTC))
    committed = _committed(client, name)
    if topics:
        chosen = [(topic, index) for topic in topics for index in client.partitions(topic)]
    else:
        chosen = sorted(committed)
        _require(client, name)
    if not chosen:
        raise UsageError(f"Group {name} has committed no offsets.", "Say which topics with --topic.")
    if name in _names(client) and _describe(client, name).members:
        raise GroupNotEmpty(
            f"Group {name} has members, which move its offsets themselves.", "Stop its consumers first."
        )
    targets = _targets(client, chosen, place)
    rows = [
        {"topic": at[0], "partition": at[1], "before_offset": committed.get(at), "after_offset": offset}
        for at, offset in targets.items()
    ]
    columns = (
        Column("topic", "topic"),
        Column("partition", "partition", "number"),
        Column("before_offset", "before", "number"),
        Column("after_offset", "after", "number"),
    )
    if confirm is None and output.is_for_people:
        output.rows("partitions", rows, columns, "")
    confirm_name(name, confirm, f"This moves {plural(len(targets), 'offset')} of group {name}.")
    request = ConsumerGroupTopicPartitions(name, [TopicPartition(*at, offset) for at, offset in targets.items()])
    future = client.admin().alter_consumer_group_offsets([request], request_timeout=client.timeout_s)[name]
    for answer in client.wait(future, f"group {name}").topic_partitions:
        if answer.error:
            raise client.translate(answer.error, f"group {name}, {answer.topic}-{answer.partition}")
    output.done(f"Moved {plural(len(targets), 'offset')} of group {name}.", {"group": name, "partitions": rows})


def _targets(client: Client, chosen: list[At], place: moments.Place) -> dict[At, int]:
    bounds = client.bounds(chosen)
    if place.kind == "time":
        spec: OffsetSpec = OffsetSpec.for_timestamp(place.value)
        found = client.offsets(dict.fromkeys(chosen, spec))
        # A time after the last record is answered with -1: everything there is, is before it.
        return {at: offset if offset >= 0 else bounds[at][1] for at, offset in found.items()}
    targets = {}
    for at, (start, end) in bounds.items():
        wanted = {"beginning": start, "end": end, "offset": place.value, "last": end - place.value}[place.kind]
        targets[at] = min(max(wanted, start), end)
    return targets


def _names(client: Client) -> list[str]:
    found = client.wait(client.admin().list_consumer_groups(request_timeout=client.timeout_s))
    if found.errors and not found.valid:
        raise client.translate(found.errors[0].args[0])
    return sorted(listing.group_id for listing in found.valid)


def _require(client: Client, name: str) -> None:
    if name not in _names(client):
        raise GroupNotFound(f"There is no group {name}.", "`walstream group list` shows the groups there are.")


def _describe(client: Client, name: str) -> ConsumerGroupDescription:
    futures = client.admin().describe_consumer_groups([name], request_timeout=client.timeout_s)
    found: ConsumerGroupDescription = client.wait(futures[name], f"group {name}")
    return found


def _committed(client: Client, name: str) -> dict[At, int]:
    request = [ConsumerGroupTopicPartitions(name)]
    futures = client.admin().list_consumer_group_offsets(request, request_timeout=client.timeout_s)
    answered = client.wait(futures[name], f"group {name}").topic_partitions
    return {(at.topic, at.partition): at.offset for at in answered if at.offset >= 0}


def _lags(client: Client, committed: dict[At, int]) -> dict[At, int]:
    starts = client.offsets(dict.fromkeys(committed, EARLIEST))
    ends = client.offsets(dict.fromkeys(committed, LATEST))
    return {at: ends[at] - max(offset, starts[at]) for at, offset in committed.items()}

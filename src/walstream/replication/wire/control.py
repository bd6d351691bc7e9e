"""Every message of version 2 but DATA and REPAIR_DATA, as bytes.

Most have a fixed length, so a frame's fields are one or several of them in a row: their number is the length divided
by theirs. Those about a partition begin with topic id 16, partition i32, epoch i32, session u32; the rest is in the
table below, in the order of the dataclass. Offsets are i64 and not negative; an epoch that may be missing is -1.

The few of variable length stand alone in their frame: DIGEST_ANSWER (request u32, valid from i64, the digest),
CATALOGUE (version i64, the body), FAILURE (code u16, a String).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from struct import Struct
from typing import Any, Final, NamedTuple

from walstream.errors import MalformedFrame, UnexpectedFrame
from walstream.replication.messages import (
    Accept,
    Catalogue,
    CatalogueAck,
    Credit,
    CreditNeeded,
    DigestAnswer,
    DigestRequest,
    Diverging,
    Failure,
    Heartbeat,
    HeartbeatAck,
    Message,
    Open,
    Progress,
    Refused,
    RepairRequest,
    ReplicaFlag,
    Reset,
    Resync,
    Rewind,
    State,
    Watermark,
    Why,
)
from walstream.replication.wire.fields import Fields, string
from walstream.replication.wire.frames import KEY_BYTES, Keys, frame

FAILURE: Final = 3
CATALOGUE: Final = 8
OPEN: Final = 16
DIGEST_ANSWER: Final = 28

_PLACE: Final = f"{KEY_BYTES}siI"
_FLAGS: Final = tuple(ReplicaFlag(bits) for bits in range(4))
_FLAGS_MAX: Final = len(_FLAGS) - 1
_WHYS: Final = {int(why): why for why in Why}

_ANSWER: Final = Struct(f">{_PLACE}Iq")
_CATALOGUE: Final = Struct(">q")
_FAILURE: Final = Struct(">H")


class _Layout(NamedTuple):
    kind: int
    message: Callable[..., Any]
    struct: Struct
    values: Callable[[Any], tuple[Any, ...]]
    """The message's fields in order."""
    least: int
    """The smallest value that any of the fields may have."""
    has_place: bool
    coded: int = -1
    """Which field is one of `codes`, counted from the end."""
    codes: Any = None


def _about_partition(
    kind: int, message: type[Any], rest: str, *, least: int = 0, coded: int = -1, codes: Any = None
) -> _Layout:
    names = list(message.__dataclass_fields__)
    return _Layout(kind, message, Struct(f">{_PLACE}{rest}"), attrgetter(*names), least, True, coded, codes)


def _about_link(kind: int, message: type[Any], rest: str) -> _Layout:
    (name,) = message.__dataclass_fields__
    get = attrgetter(name)
    return _Layout(kind, message, Struct(f">{rest}"), lambda item: (get(item),), 0, False)


_LAYOUTS: Final = (
    _about_link(4, Heartbeat, "q"),
    _about_link(5, HeartbeatAck, "q"),
    _about_link(6, Credit, "q"),
    _about_link(7, CreditNeeded, "q"),
    _about_link(9, CatalogueAck, "q"),
    _about_partition(OPEN, Open, "qqqqi", least=-1),
    _about_partition(17, State, "qqiqB", least=-1, codes=_FLAGS),
    _about_partition(18, Accept, "q"),
    _about_partition(19, Diverging, "iq", least=-1),
    _about_partition(20, Reset, "q"),
    _about_partition(21, Rewind, "q"),
    _about_partition(22, Refused, "Bi", least=-1, coded=-2, codes=_WHYS),
    _about_partition(24, Watermark, "qqq"),
    _about_partition(25, Progress, "qqB", codes=_FLAGS),
    _about_partition(26, Resync, "q"),
    _about_partition(27, DigestRequest, "Iqq"),
    _about_partition(29, RepairRequest, "IqqI"),
)
_BY_MESSAGE: Final[dict[type[Any], _Layout]] = {layout.message: layout for layout in _LAYOUTS}  # type: ignore[misc]
_PROGRESS: Final = _BY_MESSAGE[Progress]
_BY_KIND: Final = {layout.kind: layout for layout in _LAYOUTS}

KIND_OF: Final[dict[type[Any], int]] = {message: layout.kind for message, layout in _BY_MESSAGE.items()} | {
    Failure: FAILURE,
    Catalogue: CATALOGUE,
    DigestAnswer: DIGEST_ANSWER,
}
"""The type of the frame that carries a message."""


def encode_control(messages: list[Message], keys: Keys) -> list[bytes]:
    """Return the frames of messages that are not DATA, in order; neighbours of one kind share a frame."""
    result: list[bytes] = []
    run: list[bytes] = []
    layout: _Layout | None = None
    for message in messages:
        following = _BY_MESSAGE.get(type(message))
        if layout is not None and following is not layout:
            result.append(frame(layout.kind, b"".join(run)))
            run = []
        layout = following
        if layout is None:
            result.append(_encode_variable(message, keys))
        elif layout.has_place:
            values = layout.values(message)
            run.append(layout.struct.pack(keys.encode(values[0]), *values[1:]))
        else:
            run.append(layout.struct.pack(*layout.values(message)))
    if layout is not None:
        result.append(frame(layout.kind, b"".join(run)))
    return result


def decode_control(kind: int, fields: memoryview, keys: Keys, into: list[Any]) -> None:
    """Append the messages of a frame to `into`, all of them or none. Raises LinkError."""
    layout = _BY_KIND.get(kind)
    if layout is None:
        into.append(_decode_variable(kind, fields, keys))
        return
    size = layout.struct.size
    if not fields or len(fields) % size:
        raise MalformedFrame(f"A frame of type {kind} has {len(fields)} bytes of fields, not a multiple of {size}.")
    # A copy, because an iterator holds on to what it reads: before Python 3.11.9 the garbage collector crashes when it
    # finds a view that something holds on to, and an error's traceback may well lead it there.
    copied = bytes(fields)
    if layout is _PROGRESS:
        into += _decode_progress(copied, keys)
    else:
        into += [_decode(layout, values, keys) for values in layout.struct.iter_unpack(copied)]


def _decode_progress(fields: bytes, keys: Keys) -> list[Any]:
    """Decode PROGRESS, which comes for every partition after every flush, without detours."""
    messages = []
    for key, epoch, session, durable_end, high_watermark, flags in _PROGRESS.struct.iter_unpack(fields):
        if epoch < 0 or durable_end < 0 or high_watermark < 0 or flags > _FLAGS_MAX:
            raise MalformedFrame(f"PROGRESS of epoch {epoch} to {durable_end}, {high_watermark}, {flags} cannot be.")
        messages.append(Progress(keys.decode(key), epoch, session, durable_end, high_watermark, _FLAGS[flags]))
    return messages


def _decode(layout: _Layout, values: tuple[Any, ...], keys: Keys) -> Any:
    if layout.has_place:
        key = keys.decode_new(values[0]) if layout.kind == OPEN else keys.decode(values[0])
        values = (key, *values[1:])
        if values[1] < 0 or min(values[3:]) < layout.least:
            raise MalformedFrame(f"A message of type {layout.kind} has a negative offset or epoch: {values[1:]}.")
        if layout.codes is not None:
            values = _decode_code(layout, values)
    elif values[0] < 0:
        raise MalformedFrame(f"A message of type {layout.kind} says {values[0]}, which is negative.")
    return layout.message(*values)


def _decode_code(layout: _Layout, values: tuple[Any, ...]) -> tuple[Any, ...]:
    place = len(values) + layout.coded
    try:
        code = layout.codes[values[place]]
    except (IndexError, KeyError):
        raise MalformedFrame(f"A message of type {layout.kind} says {values[place]}, which has no meaning.") from None
    return (*values[:place], code, *values[place + 1 :])


def _encode_variable(message: Message, keys: Keys) -> bytes:
    match message:
        case DigestAnswer(key, epoch, session, request, valid_from, value):
            return frame(DIGEST_ANSWER, _ANSWER.pack(keys.encode(key), epoch, session, request, valid_from) + value)
        case Catalogue(version, body):
            return frame(CATALOGUE, _CATALOGUE.pack(version) + body)
        case Failure(code, text):
            return frame(FAILURE, _FAILURE.pack(code) + string(text))
        case _:
            raise AssertionError(f"{type(message).__name__} is not a control message")


def _decode_variable(kind: int, data: memoryview, keys: Keys) -> Message:
    fields = Fields(data)
    if kind == DIGEST_ANSWER:
        key, epoch, session, request, valid_from = fields.unpack(_ANSWER)
        if epoch < 0 or valid_from < 0:
            raise MalformedFrame(f"A digest of epoch {epoch} from {valid_from} cannot be.")
        return DigestAnswer(keys.decode(key), epoch, session, request, valid_from, bytes(fields.take(fields.left)))
    if kind == CATALOGUE:
        (version,) = fields.unpack(_CATALOGUE)
        return Catalogue(version, bytes(fields.take(fields.left)))
    if kind == FAILURE:
        (code,) = fields.unpack(_FAILURE)
        text = fields.string("reason")
        fields.finish()
        return Failure(code, text)
    raise UnexpectedFrame(f"A frame of type {kind} is none that this version knows.")

"""What PostgreSQL's errors mean here: each SQLSTATE, and each refusal of a connection, as an error of our tree.

Owns that table; refuses to know who asked. A failed connection carries no SQLSTATE in libpq, only the server's text,
which the administrator may have translated: what is not recognised counts as unreachable, so that the worst outcome of
a foreign language is a retry. Sans-IO.
"""

from __future__ import annotations

import re
from typing import Final

import psycopg
from psycopg import pq

from walstream.errors import (
    AuthenticationFailed,
    ConnectionLost,
    LockTimeout,
    NotAuthorized,
    PublicationMissing,
    QueryFailed,
    RefusedError,
    SlotBusy,
    SlotExists,
    SlotLost,
    SlotMissing,
    SourceError,
    SourceNotReady,
    UnreachableError,
    WalstreamError,
)

Field: Final = pq.DiagnosticField

UNDEFINED_OBJECT: Final = "42704"
DUPLICATE_OBJECT: Final = "42710"
OBJECT_IN_USE: Final = "55006"
NOT_IN_PREREQUISITE_STATE: Final = "55000"
UNDEFINED_FILE: Final = "58P01"
INSUFFICIENT_PRIVILEGE: Final = "42501"
CONFIGURATION_LIMIT: Final = "53400"
TOO_MANY_CONNECTIONS: Final = "53300"
QUERY_CANCELED: Final = "57014"
LOCK_NOT_AVAILABLE: Final = "55P03"

# The session is over when one of these comes: the server shuts down, crashed, starts, or an administrator ended us.
_SESSION_OVER: Final = ("57P01", "57P02", "57P03", "57P04", "57P05", "08")

_LOCK_HINT: Final = (
    "SELECT pid, relation::regclass FROM pg_locks WHERE mode = 'AccessExclusiveLock'; shows which session."
)

_NO_SLOT_HINT: Final = (
    "What it stood for cannot be had any more if it was dropped. Look with `walstream capture check`; a new slot needs "
    "a new snapshot."
)
_LOST_SLOT_HINT: Final = (
    "PostgreSQL removed WAL that was not captured yet: drop the slot and take a new snapshot. To prevent it, raise "
    "max_slot_wal_keep_size (and idle_replication_slot_timeout) or run the capture more often."
)

_PUBLICATION_HINT: Final = (
    "It must have been there when the changes were made. Create it (CREATE PUBLICATION … FOR TABLE …), drop the slot "
    "and take a new snapshot."
)

_FUNCTIONS: Final = (
    (re.compile("[Pp]ublication"), "publication"),
    (re.compile("CheckLogicalDecodingRequirements"), "wal_level"),
    (re.compile("[Ss]lot|CreateDecodingContext|StartLogicalReplication"), "slot"),
)
_WORDS: Final = (
    (re.compile('^(skipped loading )?publication "'), "publication"),
    (re.compile("wal_level"), "wal_level"),
    (re.compile("slot"), "slot"),
)

# What the server says when it refuses a connection, in English, with the class of each.
_REFUSALS: Final[tuple[tuple[re.Pattern[str], type[WalstreamError], str], ...]] = (
    (
        re.compile(r"\w+ authentication failed|no password supplied|password is empty|SASL authentication"),
        AuthenticationFailed,
        "Check source.postgres.user and the variable that password_env names.",
    ),
    (
        re.compile(r"no pg_hba\.conf entry|pg_hba\.conf rejects"),
        RefusedError,
        "Add a line to pg_hba.conf that lets this user in, for replication connections too.",
    ),
    (
        re.compile(r'role "[^"]*" (does not exist|is not permitted to log in)'),
        AuthenticationFailed,
        "Create the role with LOGIN and REPLICATION, or set source.postgres.user.",
    ),
    (
        re.compile(r"permission denied to start WAL sender|must be (a )?superuser or replication role"),
        NotAuthorized,
        "Give the role the REPLICATION attribute: ALTER ROLE … REPLICATION;",
    ),
    (
        re.compile(r"permission denied for database"),
        NotAuthorized,
        "GRANT CONNECT ON DATABASE … TO …;",
    ),
    (
        re.compile(r'database "[^"]*" does not exist|is not currently accepting connections'),
        SourceNotReady,
        "Set source.postgres.database to a database that is there.",
    ),
    (
        re.compile(
            r"server does not support SSL|certificate verify failed|root certificate file|does not match host name"
        ),
        RefusedError,
        "Check sslmode and the certificates.",
    ),
)


def connection_failure(error: psycopg.OperationalError, where: str) -> WalstreamError:
    """Name a connection that could not be made."""
    text = _one_line(str(error))
    for pattern, kind, hint in _REFUSALS:
        if pattern.search(text):
            return kind(f"PostgreSQL at {where} refused the connection: {text}.", hint)
    return UnreachableError(
        f"PostgreSQL at {where} cannot be reached: {text}.", "Is it running, and is that its address?"
    )


def failure(error: psycopg.Error, doing: str) -> WalstreamError:
    """Name what went wrong with a statement of an ordinary session."""
    if error.sqlstate is None:
        return ConnectionLost(f"The connection to PostgreSQL ended while {doing}: {_one_line(str(error))}.")
    diag = error.diag
    message = diag.message_primary or str(error)
    return server_failure(error.sqlstate, message, doing, diag.message_detail, diag.source_function)


def result_failure(result: pq.abc.PGresult, doing: str) -> WalstreamError:
    """Name what an error result of libpq says."""
    state, message, detail, function = (
        (result.error_field(field) or b"").decode("utf-8", "replace")
        for field in (Field.SQLSTATE, Field.MESSAGE_PRIMARY, Field.MESSAGE_DETAIL, Field.SOURCE_FUNCTION)
    )
    if not state:
        # libpq made this result itself, because the connection broke.
        text = result.error_message.decode("utf-8", "replace") or pq.ExecStatus(result.status).name
        return ConnectionLost(f"The connection to PostgreSQL ended while {doing}: {_one_line(text)}.")
    return server_failure(state, message, doing, detail, function)


def publication_skipped(notice: pq.abc.PGresult, doing: str) -> PublicationMissing | None:
    """Recognise the warning with which PostgreSQL 18 leaves out the rows of a publication that is not there.

    Earlier versions fail. A reader that went on would confirm rows that it never saw, so for us it is the same.
    """
    message, function = (
        (notice.error_field(field) or b"").decode("utf-8", "replace")
        for field in (Field.MESSAGE_PRIMARY, Field.SOURCE_FUNCTION)
    )
    if _subject(message, function) != "publication":
        return None
    return PublicationMissing(f"PostgreSQL said while {doing}: {_one_line(message)}.", _PUBLICATION_HINT)


def server_failure(
    sqlstate: str, message: str, doing: str, detail: str | None = None, function: str | None = None
) -> WalstreamError:
    """Name an error that the server reported; `doing` completes "while …", `function` is where the server raised it."""
    text = f"PostgreSQL said while {doing}: {_one_line(message)}" + (f" ({_one_line(detail)})" if detail else "") + "."
    if sqlstate.startswith(_SESSION_OVER):
        return ConnectionLost(text)
    if sqlstate.startswith("28"):
        return AuthenticationFailed(text)
    if sqlstate == INSUFFICIENT_PRIVILEGE:
        return NotAuthorized(text, "`walstream capture check` prints the GRANT that is missing.")
    if sqlstate == TOO_MANY_CONNECTIONS:
        return UnreachableError(text, "Raise max_connections or max_wal_senders, or end other sessions.")
    if sqlstate == CONFIGURATION_LIMIT:
        return SourceNotReady(text, "Raise max_replication_slots or drop a slot that nobody reads.")
    if sqlstate == LOCK_NOT_AVAILABLE:
        return LockTimeout(text, _LOCK_HINT, sqlstate=sqlstate)
    if sqlstate == QUERY_CANCELED:
        return QueryFailed(text, sqlstate=sqlstate)
    return _object_failure(sqlstate, _subject(message, function or ""), text)


def _object_failure(sqlstate: str, subject: str, text: str) -> WalstreamError:
    """Name an error about a slot, a publication or the level of the WAL."""
    if sqlstate == UNDEFINED_OBJECT and subject == "publication":
        return PublicationMissing(text, _PUBLICATION_HINT)
    if sqlstate == UNDEFINED_OBJECT and subject == "slot":
        return SlotMissing(text, _NO_SLOT_HINT)
    if sqlstate == DUPLICATE_OBJECT and subject == "slot":
        return SlotExists(text)
    if sqlstate == OBJECT_IN_USE and subject == "slot":
        return SlotBusy(text, "Another capture reads this slot, or PostgreSQL has not noticed yet that it is gone.")
    if sqlstate == NOT_IN_PREREQUISITE_STATE and subject == "wal_level":
        return SourceNotReady(text, "ALTER SYSTEM SET wal_level = 'logical'; and restart PostgreSQL.")
    if (sqlstate == NOT_IN_PREREQUISITE_STATE and subject == "slot") or sqlstate == UNDEFINED_FILE:
        return SlotLost(text, _LOST_SLOT_HINT)
    if sqlstate == NOT_IN_PREREQUISITE_STATE:
        return SourceError(text)
    return QueryFailed(text, sqlstate=sqlstate)


def _subject(message: str, function: str) -> str:
    """Tell what a message is about: by the server's function, which no translation changes, otherwise by its words."""
    known = next((subject for pattern, subject in _FUNCTIONS if pattern.search(function)), "")
    return known or next((subject for pattern, subject in _WORDS if pattern.search(message)), "")


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")

"""PostgreSQL's error codes as errors of our tree, with the exit code that tells a supervisor what to do."""

from __future__ import annotations

import psycopg
import pytest

from walstream import error_codes, errors
from walstream.postgres.failures import connection_failure, failure, server_failure


@pytest.mark.parametrize(
    ("sqlstate", "message", "kind", "exit_code"),
    [
        ("57P01", "terminating connection due to administrator command", errors.ConnectionLost, 3),
        ("57P02", "terminating connection because of crash of another server process", errors.ConnectionLost, 3),
        ("57P03", "the database system is starting up", errors.ConnectionLost, 3),
        ("08006", "connection failure", errors.ConnectionLost, 3),
        ("53300", "too many clients already", errors.UnreachableError, 3),
        ("28P01", "password authentication failed", errors.AuthenticationFailed, 5),
        ("42501", "permission denied for table t", errors.NotAuthorized, 5),
        ("42704", 'replication slot "s" does not exist', errors.SlotMissing, 5),
        ("42704", 'publication "p" does not exist', errors.PublicationMissing, 5),
        ("42710", 'replication slot "s" already exists', errors.SlotExists, 1),
        ("55006", 'replication slot "s" is active for PID 7', errors.SlotBusy, 1),
        ("55000", 'can no longer access replication slot "s"', errors.SlotLost, 5),
        ("55000", "logical decoding requires wal_level >= logical", errors.SourceNotReady, 5),
        ("55000", "recovery is in progress", errors.SourceError, 5),
        ("58P01", "requested WAL segment 000000010000000000000001 has already been removed", errors.SlotLost, 5),
        ("53400", "all replication slots are in use", errors.SourceNotReady, 5),
        ("55P03", "canceling statement due to lock timeout", errors.LockTimeout, 1),
        ("57014", "canceling statement due to user request", errors.QueryFailed, 1),
        ("42601", "syntax error", errors.QueryFailed, 1),
        ("XX000", "could not read block", errors.QueryFailed, 1),
    ],
)
def test_sqlstates(sqlstate: str, message: str, kind: type[errors.WalstreamError], exit_code: int) -> None:
    found = server_failure(sqlstate, message + "\n", "testing", "some detail.")
    assert type(found) is kind
    assert error_codes.codes(found).exit == exit_code
    assert found.message == f"PostgreSQL said while testing: {message} (some detail)."
    assert found.retryable == (exit_code == 3 or kind in (errors.SlotBusy, errors.LockTimeout))


@pytest.mark.parametrize(
    ("sqlstate", "function", "kind"),
    [
        ("42704", "ReplicationSlotAcquire", errors.SlotMissing),
        ("42704", "get_publication_oid", errors.PublicationMissing),
        ("42710", "ReplicationSlotCreate", errors.SlotExists),
        ("55006", "ReplicationSlotAcquire", errors.SlotBusy),
        ("55000", "ReplicationSlotAcquire", errors.SlotLost),
        ("55000", "CreateDecodingContext", errors.SlotLost),
        ("55000", "StartLogicalReplication", errors.SlotLost),
        ("55000", "CheckLogicalDecodingRequirements", errors.SourceNotReady),
    ],
)
def test_language_of_the_server_does_not_matter(
    sqlstate: str, function: str, kind: type[errors.WalstreamError]
) -> None:
    assert type(server_failure(sqlstate, "レプリケーション", "testing", None, function)) is kind


def test_names_do_not_mislead() -> None:
    found = server_failure("42704", 'replication slot "publication" does not exist', "testing")
    assert type(found) is errors.SlotMissing
    assert type(server_failure("42704", 'publication "slot" does not exist', "testing")) is errors.PublicationMissing


def test_refusal_in_a_foreign_language_can_be_tried_again() -> None:
    found = connection_failure(psycopg.OperationalError("FATAL: Passwort-Authentifizierung fehlgeschlagen"), "host:1")
    assert type(found) is errors.UnreachableError
    assert "host:1" in found.message


def test_broken_connection_has_no_sqlstate() -> None:
    found = failure(psycopg.OperationalError("the connection is lost"), "testing")
    assert type(found) is errors.ConnectionLost
    assert found.retryable

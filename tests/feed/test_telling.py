"""Errors as tenants hear them: the same status, and no name of a topic."""

from __future__ import annotations

import pytest

from walstream.error_codes import codes
from walstream.errors import (
    CorruptBatch,
    DataLoss,
    LogLost,
    LogUnfit,
    LsnNotAvailable,
    NotAuthorized,
    SubscriberLapsed,
    UnreachableError,
    UsageError,
    WalstreamError,
)
from walstream.feed.reading.log_errors import error_of, unreachable
from walstream.feed.reading.resolved import Broken
from walstream.feed.service.telling import telling, told
from walstream.positions import GlobalLsn, TopicPartition

SECRET = TopicPartition("secret", 3)


@pytest.mark.parametrize(
    "error",
    [
        Broken(SECRET, 5, 9).error(),
        CorruptBatch(f"The batch of {SECRET} at offset 3 does not match its CRC."),
        DataLoss("rows of secret-3", "secret"),
        LogLost(f"{SECRET} is lost"),
        LogUnfit("secret has no append time", "alter secret"),
        unreachable("secret:9092", "it does not answer"),
        *(error_of(code, str(SECRET)) for code in (1, 2, 3, 5, 6, 29, 31, 77, 12345)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_name_reaches_a_tenant(error: WalstreamError) -> None:
    assert told(error, "admin") is error
    assert "secret" in str(error)
    said = told(error, "replication")
    assert "secret" not in str(said)
    assert said.message
    assert (codes(said), type(said)) == (codes(error), type(error))
    with pytest.raises(type(error)) as caught, telling("replication"):
        raise error
    assert "secret" not in str(caught.value)


def test_where_to_go_on_is_told_to_everybody() -> None:
    said = str(told(Broken(SECRET, 5, 9).error(), "replication"))
    assert f"Begin at {GlobalLsn(5)} to have it" in said
    assert f"behind {GlobalLsn(9)}" in said


@pytest.mark.parametrize(
    "error",
    [
        LsnNotAvailable.of(GlobalLsn(1), GlobalLsn(2), GlobalLsn(3)),
        NotAuthorized("The token does not allow this tenant."),
        SubscriberLapsed("subscriber_lapsed: acme/ann"),
        UnreachableError("feed_stopping"),
        UsageError("What is this?"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_about_the_call_is_told_as_it_is(error: WalstreamError) -> None:
    assert told(error, "replication") is error

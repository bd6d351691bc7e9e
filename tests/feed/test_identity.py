"""What the claims of a verified token mean: times, names, roles, tenants, and how long a stream may last."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feed.issuer import NOW_S, body
from walstream.config import FeedAuthConfig
from walstream.error_codes import codes
from walstream.errors import AuthenticationFailed, NotAuthorized, TokenExpired, WalstreamError
from walstream.feed.auth.identity import Identity, Session, identify

CONFIG = FeedAuthConfig(clock_skew_s=30)


def of(now_s: float = NOW_S, config: FeedAuthConfig = CONFIG, **changes: Any) -> Identity:
    return identify(body(**changes), config, now_s)


def refuse(kind: type[WalstreamError], now_s: float = NOW_S, **changes: Any) -> WalstreamError:
    with pytest.raises(kind) as caught:
        of(now_s, **changes)
    assert caught.value.hint
    return caught.value


def test_a_good_token() -> None:
    assert of() == Identity("replica-7", "replication", "acme", NOW_S + 630, "t-1")


def test_an_admin_has_no_tenant_of_its_own() -> None:
    assert of(role="admin") == of(role="admin", tenant=None) == Identity("replica-7", "admin", "", NOW_S + 630, "t-1")


class TestTimes:
    @pytest.mark.parametrize("skew_s", [0, 30, 300])
    def test_exp_counts_until_the_skew_is_used_up(self, skew_s: int) -> None:
        config = FeedAuthConfig(clock_skew_s=skew_s)
        end_s = NOW_S + skew_s
        assert of(end_s - 0.001, config, exp=NOW_S).expires_at_s == end_s
        with pytest.raises(TokenExpired):
            of(end_s, config, exp=NOW_S)

    @pytest.mark.parametrize("skew_s", [0, 30, 300])
    @pytest.mark.parametrize("claim", ["nbf", "iat"])
    def test_nbf_and_iat_count_from_the_skew_on(self, claim: str, skew_s: int) -> None:
        config = FeedAuthConfig(clock_skew_s=skew_s)
        assert of(NOW_S - skew_s, config, **{claim: NOW_S})
        with pytest.raises(AuthenticationFailed, match=f"does not count yet \\({claim}\\)"):
            of(NOW_S - skew_s - 0.001, config, **{claim: NOW_S})

    def test_expiry_is_needed(self) -> None:
        assert "no end (exp)" in refuse(AuthenticationFailed, exp=None).message

    @pytest.mark.parametrize("value", ["1800000600", True, [], {}, float("nan"), float("inf"), float("-inf"), 2**53])
    @pytest.mark.parametrize("claim", ["exp", "nbf", "iat"])
    def test_what_is_no_time(self, claim: str, value: object) -> None:
        assert f"{claim} is no time" in refuse(AuthenticationFailed, **{claim: value}).message

    def test_parts_of_seconds(self) -> None:
        assert of(NOW_S + 30.2, exp=NOW_S + 0.5)
        refuse(TokenExpired, NOW_S + 30.5, exp=NOW_S + 0.5)


class TestNames:
    @pytest.mark.parametrize("subject", [None, "", 7, ["a"], "x" * 256, "a\nb", "\ud800", "\x1b[31m"])
    def test_subject(self, subject: object) -> None:
        refuse(AuthenticationFailed, sub=subject)

    @pytest.mark.parametrize("token_id", [7, "x" * 256, "a\0"])
    def test_token_id(self, token_id: object) -> None:
        refuse(AuthenticationFailed, jti=token_id)

    def test_token_id_may_be_missing(self) -> None:
        assert of(jti=None).token_id == ""


class TestRoles:
    @pytest.mark.parametrize("role", [None, "", "Admin", "root", ["admin"], {"admin": True}, 1, True])
    def test_no_role(self, role: object) -> None:
        error = refuse(NotAuthorized, role=role)
        assert codes(error).grpc == "PERMISSION_DENIED"
        assert "root" not in str(error)

    @pytest.mark.parametrize("tenant", [None, ""])
    def test_replication_needs_a_tenant(self, tenant: str | None) -> None:
        assert codes(refuse(NotAuthorized, tenant=tenant)).grpc == "PERMISSION_DENIED"

    @pytest.mark.parametrize("tenant", [7, ["acme"], "a\nb"])
    def test_a_tenant_is_a_name(self, tenant: object) -> None:
        refuse(AuthenticationFailed, tenant=tenant)

    def test_claims_by_other_names(self) -> None:
        config = FeedAuthConfig(role_claim="https://example.org/role", tenant_claim="org")
        claims = {"https://example.org/role": "replication", "org": "blue", "role": "admin", "tenant": "acme"}
        assert of(config=config, **claims).tenant == "blue"
        with pytest.raises(NotAuthorized):
            of(config=config)


class TestMayRead:
    def test_admin(self) -> None:
        admin = of(role="admin")
        assert (admin.may_read(""), admin.may_read("acme"), admin.may_read("blue")) == ("", "acme", "blue")

    def test_replication(self) -> None:
        assert of().may_read("") == of().may_read("acme") == "acme"

    @pytest.mark.parametrize("other", ["blue", "ACME", "acme ", "acm", "*", "acme,blue"])
    def test_another_tenant(self, other: str) -> None:
        with pytest.raises(NotAuthorized) as caught:
            of().may_read(other)
        assert codes(caught.value).grpc == "PERMISSION_DENIED"
        assert "acme" not in str(caught.value)

    @given(st.text(min_size=1, max_size=20), st.text(max_size=20))
    def test_replication_never_gets_all_or_another(self, tenant: str, asked: str) -> None:
        identity = Identity("a", "replication", tenant, 1.0)
        try:
            assert identity.may_read(asked) == tenant
        except NotAuthorized:
            assert asked not in ("", tenant)


class TestSession:
    def test_ends_with_its_token(self) -> None:
        session = Session(of())
        assert not session.is_over(NOW_S + 629.9)
        session.check(NOW_S + 629.9)
        assert session.is_over(NOW_S + 630)
        with pytest.raises(TokenExpired) as caught:
            session.check(NOW_S + 630)
        assert codes(caught.value).grpc == "UNAUTHENTICATED"

    def test_goes_on_with_a_newer_token(self) -> None:
        session = Session(of())
        session.renew(of(exp=NOW_S + 1200, jti="t-2"))
        assert not session.is_over(NOW_S + 630)
        assert session.is_over(NOW_S + 1230)
        assert session.identity.token_id == "t-2"

    def test_an_older_token_takes_nothing_away(self) -> None:
        session = Session(of())
        session.renew(of(exp=NOW_S + 10))
        assert not session.is_over(NOW_S + 629)

    @pytest.mark.parametrize("change", [{"sub": "replica-8"}, {"tenant": "blue"}, {"role": "admin"}])
    def test_is_not_renewed_by_another(self, change: dict[str, Any]) -> None:
        session = Session(of())
        with pytest.raises(NotAuthorized):
            session.renew(of(exp=NOW_S + 1200, **change))
        assert session.is_over(NOW_S + 630)
        assert session.identity == of()

"""What the node keeps of its users' passwords, and how texts become comparable.

A password is never kept: a credential holds what can check a proof of it, not what can make one. Its text has
PostgreSQL's form, `SCRAM-SHA-256$iterations:salt$stored key:server key` with base64 parts, so a line of `pg_authid` is
one too. No error and no representation in this module repeats a credential or a password.

Pure but for the salt of a new credential, which is random unless it is given.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import re
import secrets
import stringprep
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from walstream.errors import ConfigError, UsageError

PLAIN: Final = "PLAIN"
SCRAM_SHA_256: Final = "SCRAM-SHA-256"
SCRAM_SHA_512: Final = "SCRAM-SHA-512"
HASHES: Final = {SCRAM_SHA_256: "sha256", SCRAM_SHA_512: "sha512"}

ITERATIONS_MIN = 4096
"""RFC 7677 asks for at least this many."""
ITERATIONS_MAX = 1_000_000
"""Half a second of hashing, which PLAIN would spend here for every attempt."""
ITERATIONS_DEFAULT = 16_384
"""Four times the minimum, and the most that Apache Kafka accepts, so that credentials can move there."""
SALT_BYTES = 16

_CREDENTIAL = re.compile(r"(SCRAM-SHA-256|SCRAM-SHA-512)\$([0-9]{1,9}):([^$:]+)\$([^$:]+):([^$:]+)")
_MAKE = "`walstream user credential NAME` prints a valid one."


@dataclass(frozen=True, slots=True)
class Credential:
    """What the node keeps of a password under one SCRAM mechanism. Its keys stay out of its representation."""

    mechanism: str
    iterations: int
    salt: bytes = field(repr=False)
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)

    def __str__(self) -> str:
        """Return the text that configuration files hold: PostgreSQL's format."""
        salt, stored, server = (to_base64(part) for part in (self.salt, self.stored_key, self.server_key))
        return f"{self.mechanism}${self.iterations}:{salt}${stored}:{server}"

    def matches(self, password: str) -> bool:
        """Say whether this is the password, by deriving its keys again: as slow as its iterations."""
        derived = _derive(password, self.mechanism, self.iterations, self.salt)
        return hmac.compare_digest(derived.stored_key, self.stored_key)


def make_credential(
    password: str, mechanism: str = SCRAM_SHA_256, iterations: int = ITERATIONS_DEFAULT, salt: bytes | None = None
) -> str:
    """Return the credential text of a password; without a salt, a random one is taken."""
    if mechanism not in HASHES:
        raise UsageError(f"No credential can be made for {mechanism!r}.", f"Use one of {', '.join(HASHES)}.")
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise UsageError(f"{iterations} iterations are not allowed.", f"From {ITERATIONS_MIN:,} to {ITERATIONS_MAX:,}.")
    try:
        prepared = saslprep(password, is_stored=True)
    except ValueError as error:
        raise UsageError(f"The password cannot be used: {error}.") from None
    if not prepared:
        raise UsageError("The password is empty.")
    return str(_derive(prepared, mechanism, iterations, salt or secrets.token_bytes(SALT_BYTES)))


def parse_credential(text: str) -> Credential:
    """Read a credential text. Errors never repeat it: it may be a password in the wrong place."""
    match = _CREDENTIAL.fullmatch(text)
    if match is None:
        raise ConfigError("A credential is not of the form SCRAM-SHA-256$iterations:salt$key:key.", _MAKE)
    mechanism, iterations = match[1], int(match[2])
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise ConfigError(f"A credential's iterations are not from {ITERATIONS_MIN:,} to {ITERATIONS_MAX:,}.", _MAKE)
    try:
        salt, stored_key, server_key = (from_base64(part) for part in match.group(3, 4, 5))
    except ValueError:
        raise ConfigError("A credential's keys are not valid base64.", _MAKE) from None
    size = _digest_bytes(mechanism)
    if not salt or len(stored_key) != size or len(server_key) != size:
        raise ConfigError(f"A credential's keys do not have the length that {mechanism} gives them.", _MAKE)
    return Credential(mechanism, iterations, salt, stored_key, server_key)


class Credentials:
    """The users of a node, each with a credential for one or both SCRAM mechanisms.

    For a name that is no user's there is a decoy: a credential made up from the name, that no password meets. Its
    iterations and the length of its salt are those of some real user, so they tell nothing either. The secret that
    decoys are made from is random and the same for as long as possible: a salt that changes is a decoy's. It must not
    come from the credentials, because a decoy's salt would then let a stranger try passwords at home.
    """

    def __init__(self, users: Mapping[str, str | Iterable[str]], secret: bytes) -> None:
        self._secret = secret
        self._users: dict[str, tuple[Credential, ...]] = {}
        for name, texts in users.items():
            try:
                prepared = saslprep(name, is_stored=True)
            except ValueError as error:
                raise ConfigError(f"The user name {name!r} cannot be used: {error}.") from None
            if not prepared or prepared in self._users:
                raise ConfigError(f"The user name {name!r} is empty or the same as another.")
            found = tuple(parse_credential(text) for text in ((texts,) if isinstance(texts, str) else texts))
            if not found or len({credential.mechanism for credential in found}) != len(found):
                raise ConfigError(f"User {name!r} has no credential, or two for one mechanism.", _MAKE)
            self._users[prepared] = found
        self._models = {mechanism: self._model(mechanism) for mechanism in (PLAIN, *HASHES)}

    def __len__(self) -> int:
        return len(self._users)

    def mechanisms(self, name: str) -> frozenset[str]:
        """Return how the user can log in, given TLS; nothing for a name that is nobody's."""
        found = self._users.get(name, ())
        return frozenset({PLAIN, *(credential.mechanism for credential in found)}) if found else frozenset()

    def __iter__(self) -> Iterator[str]:
        return iter(self._users)

    def find(self, name: str, mechanism: str) -> tuple[Credential, bool]:
        """Return the user's credential for the mechanism (for PLAIN: the first) and True, or a decoy and False."""
        # The decoy is made for users too, so that both take the same time.
        decoy = self._decoy(name, mechanism)
        for credential in self._users.get(name, ()):
            if mechanism in (PLAIN, credential.mechanism):
                return credential, True
        return decoy, False

    def _decoy(self, name: str, mechanism: str) -> Credential:
        digest = hmac.digest(self._secret, f"{mechanism} {name}".encode(), "sha512")
        models = self._models[mechanism]
        model = models[int.from_bytes(digest[:8], "big") % len(models)]
        salt = hashlib.shake_256(digest).digest(len(model.salt))
        key = digest[-_digest_bytes(model.mechanism) :]
        return Credential(model.mechanism, model.iterations, salt, stored_key=key, server_key=key)

    def _model(self, mechanism: str) -> list[Credential]:
        """Return the credentials that decoys for the mechanism take after."""
        found = [
            next((credential for credential in user if mechanism in (PLAIN, credential.mechanism)), None)
            for user in self._users.values()
        ]
        scram = SCRAM_SHA_256 if mechanism == PLAIN else mechanism
        nobody = Credential(scram, ITERATIONS_DEFAULT, bytes(SALT_BYTES), b"", b"")
        return [credential for credential in found if credential] or [nobody]


def saslprep(text: str, *, is_stored: bool = False) -> str:
    """Prepare a name or password by RFC 4013; a stored one may not hold characters that Unicode 3.2 did not know.

    Most Kafka clients do not do this. It changes nothing in ASCII, so it is only outside ASCII that such a client can
    fail to log in, by a password that another form of the same characters would have made the same.
    """
    if text.isascii() and text.isprintable():
        return text
    mapped = "".join(
        " " if stringprep.in_table_c12(character) else character
        for character in text
        if not stringprep.in_table_b1(character)
    )
    prepared = unicodedata.ucd_3_2_0.normalize("NFKC", mapped)
    if any(prohibited(character) for character in prepared for prohibited in _PROHIBITED):
        raise ValueError("it holds a character that is not allowed")
    if is_stored and any(map(stringprep.in_table_a1, prepared)):
        raise ValueError("it holds a character that SASLprep does not know")
    if any(map(stringprep.in_table_d1, prepared)) and (
        any(map(stringprep.in_table_d2, prepared))
        or not (stringprep.in_table_d1(prepared[0]) and stringprep.in_table_d1(prepared[-1]))
    ):
        raise ValueError("it mixes directions of writing")
    return prepared


_PROHIBITED = (
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
)


def _derive(password: str, mechanism: str, iterations: int, salt: bytes) -> Credential:
    algorithm = HASHES[mechanism]
    salted = hashlib.pbkdf2_hmac(algorithm, password.encode(), salt, iterations)
    stored_key = hashlib.new(algorithm, hmac.digest(salted, b"Client Key", algorithm)).digest()
    return Credential(mechanism, iterations, salt, stored_key, hmac.digest(salted, b"Server Key", algorithm))


def _digest_bytes(mechanism: str) -> int:
    return hashlib.new(HASHES[mechanism]).digest_size


def to_base64(data: bytes) -> str:
    """Return the bytes as base64 text."""
    return binascii.b2a_base64(data, newline=False).decode()


def from_base64(text: str) -> bytes:
    """Return the bytes of a base64 text; raise ValueError unless it is one and nothing else."""
    return binascii.a2b_base64(text, strict_mode=True)

"""Certificates for tests, made by the `openssl` command: an authority that signs for servers and clients."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pair:
    """The PEM files of a certificate and its private key."""

    certificate: str
    key: str


class Authority:
    """A certificate authority that lives in a folder of its test."""

    def __init__(self, folder: Path, name: str = "Test authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.pair = Pair(str(folder / "ca.pem"), str(folder / "ca.key"))
        _openssl(
            *("req", "-x509", *_NEW_KEY, "-subj", f"/CN={name}", "-days", "2"),
            *("-keyout", self.pair.key, "-out", self.pair.certificate),
            *("-addext", "keyUsage=critical,keyCertSign"),
        )

    @property
    def certificate(self) -> str:
        return self.pair.certificate

    def server(self, label: str = "server") -> Pair:
        """Sign a certificate for a server on this machine."""
        return self._sign(label, "/CN=localhost", "subjectAltName=DNS:localhost,IP:127.0.0.1", "serverAuth")

    def client(self, label: str, subject: str, names: str = "") -> Pair:
        """Sign a certificate for a client; `names` are its alternative names, as `DNS:…,email:…`."""
        return self._sign(label, subject, f"subjectAltName={names}" if names else "", "clientAuth")

    def peer(self, label: str, names: str = "DNS:localhost,IP:127.0.0.1") -> Pair:
        """Sign a certificate for a node, which is a server to some and a client to others."""
        return self._sign(label, "/CN=node", f"subjectAltName={names}", "serverAuth,clientAuth")

    def _sign(self, label: str, subject: str, names: str, usage: str) -> Pair:
        pair = Pair(str(self._folder / f"{label}.pem"), str(self._folder / f"{label}.key"))
        request, extensions = self._folder / f"{label}.csr", self._folder / f"{label}.ext"
        extensions.write_text(f"extendedKeyUsage={usage}\n{names}\n")
        _openssl("req", "-new", *_NEW_KEY, "-subj", subject, "-keyout", pair.key, "-out", str(request))
        _openssl(
            *("x509", "-req", "-in", str(request), "-days", "2", "-extfile", str(extensions), "-CAcreateserial"),
            *("-CA", self.pair.certificate, "-CAkey", self.pair.key, "-out", pair.certificate),
        )
        return pair


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)

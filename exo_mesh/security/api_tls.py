"""TLS of the HTTP API, with the operator's certificate and key, which are read again when the files change."""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

from exo_mesh.beat import next_beat

LOOK_EVERY_S = 3.0
"""Interval of the file checks. certbot replaces a certificate every two months, and no one waits for it."""

_log = logging.getLogger(__name__)


class ApiTls:
    """Holds the TLS `context` for new connections; open connections keep theirs. Raises ValueError if certificate and
    key do not match."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self._seen = self._state()
        self.context = server_context(certificate, key)

    async def keep(self, look_every_s: float = LOOK_EVERY_S) -> None:
        """Reload changed files until cancelled."""
        while True:
            await next_beat(look_every_s)
            self.reload_if_changed()

    def reload_if_changed(self) -> bool:
        """Load the files if they changed and match each other; True if they were loaded."""
        state = self._state()
        if state == self._seen:
            return False
        self._seen = state
        try:
            self.context = server_context(self._certificate, self._key)
        except ValueError as exc:
            _log.warning("the API keeps its old certificate: %s", exc)
            return False
        _log.info("the API uses the new certificate in %s", self._certificate)
        return True

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Values that change when one of the files is written or replaced."""
        return tuple(_stat_of(path) for path in (self._certificate, self._key))


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """A context for TLS 1.2 or newer with this certificate and key. Raises ValueError that names the file and the
    reason."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    for path in (certificate, key):
        try:
            path.read_bytes()
        except OSError as exc:
            raise ValueError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificate)
    except (ssl.SSLError, ValueError) as exc:
        raise ValueError(f"{certificate} has no certificate in PEM form") from exc
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as exc:
        if getattr(exc, "reason", "") == "KEY_VALUES_MISMATCH":
            raise ValueError(f"the key in {key} does not belong to the certificate in {certificate}") from exc
        raise ValueError(f"{key} has no private key in PEM form that can be read without a passphrase") from exc
    return context


def _no_passphrase() -> str:
    """Prevents OpenSSL from asking for a passphrase on the terminal."""
    return ""


def _stat_of(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino

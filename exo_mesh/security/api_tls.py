"""TLS of the HTTP API, with the operator's certificate and key, which are read again when the files change."""

from __future__ import annotations

import codecs
import logging
import os
import ssl
import stat
from pathlib import Path

from exo_mesh.base.wakeups import next_wakeup

LOOK_EVERY_S = 3.0
"""Interval of the file checks. certbot replaces a certificate every two months, and no one waits for it."""

MAX_PEM_BYTES = 4 * 2**20
"""Largest file of certificates or of a key. The authorities that systems trust take about 250 KB together."""

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
            await next_wakeup(look_every_s)
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
        read_pem(path)
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


def read_pem(path: Path) -> bytes:
    """The content of a file in PEM form. OpenSSL itself reads a device without end, and waits at a pipe. Raises
    ValueError that names the file and the reason, also for anything but a regular file of at most MAX_PEM_BYTES."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(MAX_PEM_BYTES + 1) if is_regular else b""
    except (OSError, ValueError) as exc:  # a ValueError: the path contains a NUL character
        raise ValueError(f"{path} cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    if not is_regular:
        raise ValueError(f"{path} is not a regular file")
    if len(content) > MAX_PEM_BYTES:
        raise ValueError(f"{path} has more than {MAX_PEM_BYTES} bytes")
    if content.startswith(codecs.BOM_UTF8):
        raise ValueError(f"{path} begins with a byte-order mark, which OpenSSL cannot read: save it without one")
    return content


def _no_passphrase() -> str:
    """Prevents OpenSSL from asking for a passphrase on the terminal."""
    return ""


def _stat_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

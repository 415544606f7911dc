"""Waits until a port accepts connections, for units that start after another program."""

from __future__ import annotations

import socket
import time

from exo_mesh.base.printable import quoted
from exo_mesh.settings.config import ConfigError

_TRY_EVERY_S = 0.25
_CONNECT_S = 1.0


def wait_for_port(address: str, for_s: float) -> bool:
    """Waits up to for_s for "host:port" to accept a connection; returns whether it did."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise ConfigError(f"{quoted(address)} is not of the form HOST:PORT")
    end = time.monotonic() + for_s
    while True:
        left_s = end - time.monotonic()
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=max(0.05, min(_CONNECT_S, left_s))):
                return True
        except OSError:
            if left_s <= 0:
                return False
            time.sleep(min(_TRY_EVERY_S, left_s))

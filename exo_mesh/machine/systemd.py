"""Notifies systemd of a node's state: ready, alive, stopping, and a status line; see sd_notify(3)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, MutableMapping

import msgspec

from exo_mesh.base.wakeups import next_wakeup

STATUS_EVERY_S = 5.0
"""How old the line in `systemctl status` may become."""

_log = logging.getLogger(__name__)


class Notifier(msgspec.Struct, frozen=True):
    """The connection to systemd. address: of its socket, empty without systemd. watchdog_s: systemd restarts the node
    after this much silence."""

    address: str = ""
    watchdog_s: float | None = None

    def tell(self, **fields: str | int) -> None:
        """Sends `KEY=value` lines in one datagram. A failure is logged and otherwise ignored."""
        if not self.address:
            return
        message = "\n".join(f"{key}={str(value).replace(chr(10), ' ')}" for key, value in fields.items())
        # a leading @ stands for the zero byte of Linux's abstract names
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.connect(address)
                sock.send(message.encode())
        except OSError as exc:
            _log.warning("systemd cannot be notified at %s: %s", self.address, exc)


def take_notifier(environ: MutableMapping[str, str], pid: int) -> Notifier:
    """Reads what systemd put into the environment, and removes it so that child processes do not see it."""
    address = environ.pop("NOTIFY_SOCKET", "")
    microseconds, for_pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
    ours = for_pid in ("", str(pid)) and microseconds.isascii() and microseconds.isdigit() and int(microseconds) > 0
    if not address.startswith(("/", "@")):
        return Notifier()
    return Notifier(address, int(microseconds) / 1e6 if ours else None)


@contextlib.asynccontextmanager
async def supervised(
    notifier: Notifier, status: Callable[[], str], comes_back: Callable[[], bool] = lambda: False
) -> AsyncIterator[None]:
    """Notifies systemd: ready when entered, stopping when left; in between, periodically alive with the node's status.

    comes_back: whether the process continues as a new node. Then systemd is not notified of the stop, or it would end
    the process.
    """
    if not notifier.address:
        yield
        return
    notifier.tell(READY=1, STATUS=status(), MAINPID=os.getpid())
    task = asyncio.create_task(_keep_telling(notifier, status), name="systemd")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if comes_back():
            notifier.tell(STATUS="restarting")
        else:
            notifier.tell(STOPPING=1, STATUS="stopping")


async def _keep_telling(notifier: Notifier, status: Callable[[], str]) -> None:
    # a third of the limit, so that two notifications may be late
    every_s = min(STATUS_EVERY_S, notifier.watchdog_s / 3) if notifier.watchdog_s else STATUS_EVERY_S
    while True:
        await next_wakeup(every_s)
        if notifier.watchdog_s:
            notifier.tell(WATCHDOG=1, STATUS=status())
        else:
            notifier.tell(STATUS=status())

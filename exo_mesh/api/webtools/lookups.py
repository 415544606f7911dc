"""Resolves host names in threads of their own, so that a name server that does not answer delays nothing else."""

from __future__ import annotations

import asyncio
import socket
import threading

from exo_mesh.base.printable import reason_of
from exo_mesh.errors import InputError, OverloadError

MAX_LOOKUPS = 8
"""The system's resolver cannot be cancelled and may take half a minute; a thread is busy for so long."""


class HostLookups:
    """Runs at most MAX_LOOKUPS lookups at once, each in a daemon thread, so that none delays the end of the node."""

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(MAX_LOOKUPS)

    async def addresses(self, host: str, port: int) -> list[str]:
        """The addresses of a host, in the system's order. Raises InputError if there are none, and OverloadError."""
        if not self._slots.acquire(blocking=False):
            raise OverloadError("too many host names are being looked up; try again later", retry_after_s=5)
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[str]] = loop.create_future()

        def settle(addresses: list[str], error: InputError | None) -> None:
            if found.cancelled():
                return
            if error is None:
                found.set_result(addresses)
            else:
                found.set_exception(error)

        def look_up() -> None:
            addresses, error = [], None
            try:
                answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
            except (OSError, UnicodeError) as exc:
                error = InputError(f"the host {host} has no address ({reason_of(exc)})", param="url")
            finally:
                self._slots.release()
            try:
                loop.call_soon_threadsafe(settle, addresses, error)
            except RuntimeError:
                return  # the loop has ended, and nobody waits any more

        threading.Thread(target=look_up, name="web-tools-lookup", daemon=True).start()
        return await found

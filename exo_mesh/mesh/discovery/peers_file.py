"""Suggests the peers that a file names (`--peers-file`); the file is read again whenever it changes.

The file has one of these forms:

- JSON `{"peers": {"studio": {"address": "192.168.1.20", "port": 5000}, …}}`;
- JSON list of `"host:port"`, `{"address": …, "port": …}` or `{"host": …, "port": …}`;
- a hostfile of mlx.launch (see hostfile.py), or `{"hosts": [that list]}`, with the default port;
- lines of `host:port` or `host`, with `#` comments.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from exo_mesh.base.printable import counted
from exo_mesh.base.small_files import read_small
from exo_mesh.base.tasks import TaskOwner
from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.domain.addresses import joined
from exo_mesh.errors import InputError
from exo_mesh.mesh.discovery.hostfile import hosts_in, is_host, is_hostfile, wrong
from exo_mesh.mesh.discovery.port import Announcement, Suggest

MAX_FILE_BYTES = 1024 * 1024
MAX_FILE_PEERS = 1024
CHECK_EVERY_S = 1.0
SUGGEST_EVERY_S = 3.0
"""Interval at which unchanged peers are suggested again: a peer may start or return much later."""

_log = logging.getLogger(__name__)


def parse_peers(text: str, where: str, default_port: int) -> tuple[str, ...]:
    """ "host:port" of every peer in a text of one of the forms above, each once.

    where: the path, for messages. Raises InputError naming the path and the field or line.
    """
    if text.lstrip()[:1] in ("{", "["):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise InputError(f"{where}: not valid JSON: {exc}", param="peers_file") from exc
        found = list(_from_json(content, where, default_port))
    else:
        found = list(_from_lines(text, where, default_port))
    unique = tuple(dict.fromkeys(found))
    if len(unique) > MAX_FILE_PEERS:
        raise InputError(f"{where}: names {len(unique)} peers, more than {MAX_FILE_PEERS}", param="peers_file")
    return unique


def read_peers(path: Path, default_port: int) -> tuple[str, ...]:
    """The addresses in a peers file. Blocking. Raises InputError like parse_peers, and if the file cannot be read."""
    try:
        content = read_small(path, MAX_FILE_BYTES)
        if len(content) > MAX_FILE_BYTES:
            raise InputError(f"{path}: is larger than {MAX_FILE_BYTES} bytes", param="peers_file")
        return parse_peers(content.decode("utf-8-sig"), str(path), default_port)
    except OSError as exc:
        raise InputError(f"{path}: cannot be read: {exc.strerror}", param="peers_file") from exc
    except UnicodeDecodeError as exc:
        raise InputError(f"{path}: is not UTF-8 text: byte {exc.start} is invalid", param="peers_file") from exc


def _from_json(content: Any, where: str, default_port: int) -> Iterator[str]:
    if isinstance(content, dict):
        if "peers" not in content and "hosts" not in content:
            raise wrong(where, "peers", 'is missing; write {"peers": {"NAME": {"address": "HOST", "port": PORT}}}')
        key = "peers" if "peers" in content else "hosts"
        content = content[key]
    else:
        key = ""
    if isinstance(content, dict):
        for name, entry in content.items():
            yield from _entry(entry, where, f"{key}.{name}", default_port)
    elif isinstance(content, list) and is_hostfile(content):
        yield from (joined(host, default_port) for host in hosts_in(content, where, key))
    elif isinstance(content, list):
        for index, entry in enumerate(content):
            yield from _entry(entry, where, f"{key}[{index}]", default_port)
    else:
        raise wrong(where, key, "must be an object or a list")


def _entry(entry: Any, where: str, field: str, default_port: int) -> Iterator[str]:
    if isinstance(entry, str):
        yield _endpoint(entry, where, field, default_port)
    elif not isinstance(entry, dict):
        raise wrong(where, field, 'must be "host:port" or an object')
    elif (name := "address" if "address" in entry else "host") in entry:
        yield _address(entry[name], entry.get("port", default_port), where, field, name)
    else:
        raise wrong(where, f"{field}.address", "is missing")


def _address(host: Any, port: Any, where: str, field: str, name: str) -> str:
    if not is_host(host):
        raise wrong(where, f"{field}.{name}", "must be a host or an address")
    if type(port) is not int or not 0 < port < 65536:
        raise wrong(where, f"{field}.port", f"must be a port from 1 to 65535, not {json.dumps(port)}")
    return joined(host, port)


def _endpoint(text: str, where: str, field: str, default_port: int) -> str:
    host, colon, port = text.strip().rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):  # no port: the colons belong to an IPv6 address
        host, port = text.strip(), str(default_port)
    if not is_host(host) or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise wrong(where, field, f"{json.dumps(text.strip()[:80])} is not host:port")
    return joined(host, int(port))


def _from_lines(text: str, where: str, default_port: int) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if content := line.partition("#")[0].strip():
            yield _endpoint(content, where, f"line {number}", default_port)


class PeersFileDiscovery:
    """Suggests the peers of a file. The constructor reads the file and raises InputError. Later, an edit that cannot be
    used keeps the last good peers, with one warning."""

    name = "peers file"

    def __init__(self, path: Path, default_port: int, *, check_every_s: float = CHECK_EVERY_S) -> None:
        self._path = path
        self._default_port = default_port
        self._check_every_s = check_every_s
        self._state = _state_of(path)
        self.addresses = read_peers(path, default_port)
        self._tasks = TaskOwner()

    async def start(self, own: Announcement, suggest: Suggest) -> None:
        self._tasks.keep(lambda: self._keep_suggesting(suggest), "peers file")

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that ended because of a bug; see TaskOwner."""
        return self._tasks.ended

    async def stop(self) -> None:
        await self._tasks.close()

    async def _keep_suggesting(self, suggest: Suggest) -> None:
        loop = asyncio.get_running_loop()
        suggested_at = -SUGGEST_EVERY_S
        while True:
            changed = self.reread()
            if changed or loop.time() - suggested_at >= SUGGEST_EVERY_S:
                suggested_at = loop.time()
                for address in self.addresses:
                    suggest(address)
            await next_wakeup(self._check_every_s)

    def reread(self) -> bool:
        """Check the file; True if its peers changed. Runs without a thread: the file is local and at most a
        megabyte."""
        state = _state_of(self._path)
        if state == self._state:
            return False
        self._state = state
        try:
            addresses = read_peers(self._path, self._default_port)
        except InputError as exc:
            _log.warning("%s; keeping the %s of the last valid file", exc, counted(len(self.addresses), "peer"))
            return False
        changed, self.addresses = addresses != self.addresses, addresses
        if changed:
            _log.info("read %s: %s", self._path, counted(len(addresses), "peer"))
        return changed


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """Values that change when a file is written or replaced; None if there is no file."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino

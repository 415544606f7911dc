"""Finds the nodes of this user on this machine: their homes, their API addresses, and where the local token may go.

Each node marks the port of its API with a locked file in its home. An entry in a folder of the user names that home, so
that a command finds a node with a home of its own. The entry is only a pointer: the token goes to an address only if
the mark in the home is locked, names a process that runs on this machine, and covers that address.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import socket
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from exo_mesh.security.local_token import read_token

MAX_ENTRIES = 256
"""Entries of the user's folder that are read, and files that are looked at in it."""

_MAX_BYTES = 8192
_DIAL_S = 1.0
"""Deadline of a connection on this machine that shows whether a port listens."""
_FOLDER = "listening"
"""Folder in the home with one file per API port, named after the port and locked by the node that listens there."""


class OwnNode(msgspec.Struct, frozen=True):
    """A live node of this user. host, port: the address that its API is bound to. name: the host as its settings write
    it. certificate: that it serves HTTPS with; None for HTTP."""

    home: Path
    host: str
    port: int
    name: str = ""
    certificate: Path | None = None

    @property
    def url(self) -> str:
        """The address of its API for commands on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{'https' if self.certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def address_for(self, host: str) -> str:
        """The address to dial to reach this node, and no other program, when the user names this host; "" if that host
        is not this node.

        A name can mean several addresses, and another program can listen at the others.
        """
        if host == "localhost":
            return next((one for one in ("127.0.0.1", "::1") if _covers(self.host, one)), "")
        if host == self.name:
            return self.host
        return host if _covers(self.host, host) else ""


class ListeningMark:
    """A file in the home that marks the port on which a node of this home serves the API, and an entry in the user's
    folder of nodes that names the home. Raises OSError if the mark cannot be written."""

    def __init__(
        self,
        home: Path,
        host: str,
        port: int,
        *,
        name: str = "",
        certificate: Path | None = None,
        registry: Path | None = None,
    ) -> None:
        folder = home / _FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / str(port)
        node = {"home": str(home.absolute()), "host": host, "port": port, "name": name}
        more = {"certificate": str(certificate or ""), "pid": os.getpid(), "began": began(os.getpid())}
        text = json.dumps(node | more)
        with locked_folder(folder):
            _remove_stale(folder)
            # A new file, because a client that checks the old one may hold its lock for a moment.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(descriptor, "r+")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(text)
        self._file.flush()
        self._entry = registry / f"{os.getpid()}-{port}.json" if registry else None
        if self._entry is not None:
            with suppress(OSError):  # a service user has no such folder: its users name the home
                _write_entry(self._entry, text)

    def close(self) -> None:
        """Remove the mark, because the node no longer listens. A killed node loses the lock, which has the same
        effect."""
        for path in filter(None, (self._entry, self._path)):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self._file.close()


def live_nodes(home: Path) -> list[OwnNode]:
    """The nodes of this home that serve the API on this machine now."""
    try:
        paths = sorted((home / _FOLDER).iterdir())[:MAX_ENTRIES]
    except OSError:
        return []
    return [node for path in paths if (node := _marked(home, path))]


def registered_homes(registry: Path) -> list[Path]:
    """The homes in the user's folder of nodes, the longest running nodes first. Removes stale entries.

    A folder or file that others can write, or that another user owns, is not read. The same holds for the marks in a
    home: another user can create a home again where an entry still points, for example below /tmp.
    """
    found: dict[Path, float] = {}
    if not _is_private(registry):
        return []
    try:
        files = [path for path in registry.iterdir() if path.suffix == ".json"][:MAX_ENTRIES]
    except OSError:
        return []
    for file in files:
        try:
            entry, written = _read(file) if _is_private(file) else None, file.stat().st_mtime
        except OSError:  # its node has just stopped
            continue
        home = _home_in(entry)
        if home is None or entry is None or not _is_marked_privately(home, entry["port"]):
            with suppress(OSError):
                file.unlink(missing_ok=True)
        else:
            found[home] = min(written, found.get(home, written))
    return sorted(found, key=lambda home: found[home])


def node_at(homes: Iterable[Path], host: str, port: int) -> OwnNode | None:
    """The live node of one of these homes that serves the API at this address; None if there is none."""
    for home in homes:
        node = _marked(home, home / _FOLDER / str(port))
        if node is not None and node.address_for(host):
            return node
    return None


def token_for(homes: Iterable[Path], host: str, port: int) -> str:
    """The token, if a live node of one of these homes serves the API at this address; otherwise ""."""
    node = node_at(homes, host, port)
    return read_token(node.home) if node else ""


def is_on_this_machine(host: str) -> bool:
    """Whether an address, or a name's address, is a loopback address or another address of this machine."""
    found = [ipaddress.ip_address(address) for address in _addresses_of(host)]
    plain = [getattr(address, "ipv4_mapped", None) or address for address in found]
    return any(address.is_unspecified or _is_own(str(address)) for address in plain)


def began(pid: int) -> str:
    """When a process started, as its kernel counts it, which no setting of the clock changes; "" if it does not run.
    Two processes with one pid, one after the other or on two machines that share a home, differ in it."""
    if sys.platform == "linux":
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        except (OSError, IndexError):
            return ""
    import psutil

    with suppress(psutil.Error):
        return f"{psutil.Process(pid).create_time():.2f}"
    return ""


def _write_entry(path: Path, text: str) -> None:
    """Writes an entry, and removes entries of nodes that have gone. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_private(path.parent)
    registered_homes(path.parent)
    scratch = path.with_suffix(".new")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    scratch.replace(path)


def _marked(home: Path, path: Path) -> OwnNode | None:
    """The node of a mark whose lock is held by a process of this machine; None if there is no such mark."""
    try:
        with _opened(path) as file:
            text = file.read(_MAX_BYTES) if _is_locked(file) else ""
    except (OSError, ValueError):
        return None
    if not text or not path.name.isdecimal():
        return None
    try:
        fields = json.loads(text)
    except ValueError:  # a node of an older version, which wrote only the host as its settings have it
        host = text.strip("[]")
        return OwnNode(home, _listening_address(host, int(path.name)), int(path.name), name=host)
    if not isinstance(fields, dict) or not _runs(fields):
        return None
    host, name, certificate = (str(fields.get(key) or "") for key in ("host", "name", "certificate"))
    return OwnNode(home, host, int(path.name), name, Path(certificate) if certificate else None)


def _runs(fields: Mapping[str, Any]) -> bool:
    pid = fields.get("pid")
    return isinstance(pid, int) and pid > 0 and began(pid) == fields.get("began") != ""


def _listening_address(name: str, port: int) -> str:
    """The address of this machine that a name means and at which the port listens; the name itself if there is none."""
    for address in _addresses_of(name):
        if address != name and _is_own(address):
            with suppress(OSError), closing(socket.create_connection((address, port), _DIAL_S)):
                return address
    return name


def _addresses_of(host: str) -> list[str]:
    """The addresses that a host stands for: itself, or the addresses of a name."""
    if host == "localhost":
        return ["127.0.0.1", "::1"]
    with suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []


def _opened(path: Path) -> IO[str]:
    """Opens a mark or an entry. Raises OSError for a link, for anything but a file (a pipe would block), and for a file
    that another user put into the folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    file = os.fdopen(descriptor)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != path.parent.stat().st_uid:
        file.close()
        raise PermissionError(f"{path} does not belong to the owner of its folder")
    return file


def _read(path: Path) -> dict[str, Any] | None:
    """The fields of an entry; None for a damaged one. Raises OSError."""
    with _opened(path) as file:
        try:
            fields = json.loads(file.read(_MAX_BYTES))
        except ValueError:
            return None
    return fields if isinstance(fields, dict) and isinstance(fields.get("port"), int) else None


def _home_in(entry: Mapping[str, Any] | None) -> Path | None:
    home = (entry or {}).get("home")
    return Path(home) if isinstance(home, str) and home.startswith("/") and "\0" not in home else None


def _is_private(path: Path) -> bool:
    """Whether a file or folder belongs to this user, and nobody else can write it."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022 and not stat.S_ISLNK(found.st_mode)


def _is_marked_privately(home: Path, port: int) -> bool:
    """Whether a node holds the mark of this port, in a folder that only this user can read and write."""
    folder = home / _FOLDER
    try:
        is_private = _is_private(folder) and not folder.lstat().st_mode & 0o077
    except OSError:
        return False
    return is_private and _has_lock(folder / str(port))


def _make_private(folder: Path) -> None:
    """Takes all rights on a folder of this user from others. Raises OSError for a link, and for a folder of another
    user."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Locks a folder while something is created in it, so that another process does not remove it as abandoned before
    it is locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(folder: Path) -> None:
    for path in folder.iterdir():
        if not _has_lock(path):
            with suppress(OSError):
                path.unlink()


def _has_lock(path: Path) -> bool:
    """Whether a process holds the lock of this mark."""
    try:
        with _opened(path) as file:
            return _is_locked(file)
    except OSError:
        return False


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _covers(bound: str, host: str) -> bool:
    """Whether a connection to this host reaches a socket that is bound to this host, and no other one."""
    try:
        wanted, held = ipaddress.ip_address(host), ipaddress.ip_address(bound)
    except ValueError:
        return False
    if not held.is_unspecified or (held.version == 4 and wanted.version == 6):
        return wanted == held
    return _is_own(host)


def _is_own(host: str) -> bool:
    """Whether this machine has the address."""
    import psutil

    if ipaddress.ip_address(host).is_loopback:
        return True
    return any(one.address.partition("%")[0] == host for found in psutil.net_if_addrs().values() for one in found)

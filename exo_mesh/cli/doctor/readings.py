"""Takes the readings of `exo-mesh doctor` on this machine and from its node. Every function may block for seconds."""

from __future__ import annotations

import email.utils
import errno
import os
import platform
import secrets
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from exo_mesh.cli.doctor import checks
from exo_mesh.cli.doctor.checks import ClockReading, DirectoryReading, EchoReading, FirewallReading, PortReading
from exo_mesh.errors import DeadlineError, MeshError
from exo_mesh.mesh.discovery.choose import is_loopback
from exo_mesh.mesh.discovery.udp_sockets import LOOPBACK_BROADCAST
from exo_mesh.settings.config import LoadedSettings
from exo_mesh.text.text_files import check_text_files
from exo_mesh.weights.store import ModelStore

T = TypeVar("T")

ECHO_WAIT_S = 1.0
ASK_DEADLINE_S = 2.0
MAX_INTERFACES = 16
MAX_PEERS_ASKED = 16
MULTICAST_GROUP = "224.0.0.251"
"""The group of mDNS, because networks may filter by group. The port is a free one, which no other program uses."""


def in_time(work: Mapping[str, Callable[[], T]], deadline_s: float) -> dict[str, T | Exception]:
    """Runs each function in a thread; the result by name is its answer, its exception, or DeadlineError if it is late.

    Threads that hang keep running until the process ends.
    """
    answers: dict[str, T | Exception] = {}

    def do(name: str, part: Callable[[], T]) -> None:
        try:
            answers[name] = part()
        except Exception as exc:  # noqa: BLE001  a check that fails becomes a finding; the others continue
            answers[name] = exc

    threads = [threading.Thread(target=do, args=item, name=item[0], daemon=True) for item in work.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = DeadlineError(f"no answer within {deadline_s:g} s")
    return {name: answers.get(name, late) for name in work}


def read_ports(loaded: LoadedSettings, held_by_node: Mapping[str, int]) -> list[PortReading]:
    """Reads which ports are free. held_by_node: ports by kind (api, grpc, udp) of the node on this machine.

    Probes use the UDP port with the number of the gRPC port. It is not read if a node would use another gRPC port.
    """
    settings = loaded.settings
    wanted = [("grpc", settings.grpc_port, socket.SOCK_STREAM, "grpc_port")]
    if settings.api:
        wanted.insert(0, ("api", settings.api_port, socket.SOCK_STREAM, "api_port"))
    if "udp" in settings.discovery:
        wanted.append(("udp", settings.listen_port, socket.SOCK_DGRAM, "listen_port"))
    found = [
        PortReading(
            kind,
            port,
            port_holder(settings.host, port, transport) if port else "",
            ours=held_by_node.get(kind) == port,
            asked_for=loaded.was_set(name),
        )
        for kind, port, transport, name in wanted
    ]
    grpc = next(reading for reading in found if reading.kind == "grpc")
    if settings.probe_datagrams and grpc.port and (grpc.ours or not grpc.holder):
        holder = port_holder(settings.host, grpc.port, socket.SOCK_DGRAM, shared=False)
        found.append(PortReading("probes", grpc.port, holder, ours=grpc.ours and holder == grpc.holder))
    return found


def taken_ports(host: str, wanted: tuple[int, int] | None) -> list[int]:
    """The ports of a range (both ends included) that are in use; none if wanted is None."""
    if wanted is None:
        return []
    return [port for port in range(wanted[0], wanted[1] + 1) if not _can_bind(host, port, socket.SOCK_STREAM)]


def port_holder(host: str, port: int, transport: socket.SocketKind, *, shared: bool = True) -> str:
    """The program that holds a port: "nginx (pid 12)", "another program" if it is not visible, or "" if free. shared:
    see _can_bind."""
    if _can_bind(host, port, transport, shared=shared):
        return ""
    try:
        for connection in psutil.net_connections("tcp" if transport == socket.SOCK_STREAM else "udp"):
            listens = transport == socket.SOCK_DGRAM or connection.status == psutil.CONN_LISTEN
            if listens and connection.laddr and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass  # only root sees the sockets of other users; on macOS, a user does not even see their own
    return "another program"


def _can_bind(host: str, port: int, transport: socket.SocketKind, *, shared: bool = True) -> bool:
    """Whether a node could open this port with its socket options. shared: several programs may hold a UDP port of
    announcements, but not one of probes. Raises OSError for errors other than "in use"."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=transport, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as sock:
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared and transport == socket.SOCK_DGRAM and hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind(address)
            if transport == socket.SOCK_STREAM:
                sock.listen(1)
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def interfaces(host: str) -> list[tuple[str, str, str]]:
    """(name, IPv4 address, broadcast address) of the interfaces on which a node on `host` announces itself."""
    found: list[tuple[str, str, str]] = []
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for address in addresses:
            if name not in up or address.family != socket.AF_INET:
                continue
            if address.address.startswith("127."):
                found.insert(0, (name, address.address, LOOPBACK_BROADCAST))
            elif address.broadcast and not is_loopback(host):
                found.append((name, address.address, address.broadcast))
    return found[:MAX_INTERFACES]


def read_broadcast(host: str) -> list[EchoReading]:
    """Sends a datagram to the broadcast address of each interface, and waits for it."""
    return _echoes(interfaces(host), broadcast_echo)


def read_multicast(host: str) -> list[EchoReading]:
    """Sends a datagram to a multicast group through each interface, and waits for it."""
    return _echoes(interfaces(host), multicast_echo)


def _echoes(found: Sequence[tuple[str, str, str]], echo: Callable[[str, str, str], EchoReading]) -> list[EchoReading]:
    work = {f"{name} {address}": partial(echo, name, address, target) for name, address, target in found}
    answers = in_time(work, ECHO_WAIT_S + 1)
    return [
        answer if isinstance(answer, EchoReading) else EchoReading(name.split()[0], "", False, str(answer))
        for name, answer in answers.items()
    ]


def broadcast_echo(interface: str, address: str, target: str) -> EchoReading:
    """Sends a broadcast over one interface and waits for it. For loopback the receiver binds to loopback only."""
    with _datagram_socket() as ear, _datagram_socket() as mouth:
        try:
            ear.bind((LOOPBACK_BROADCAST if target == LOOPBACK_BROADCAST else "", 0))
            mouth.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            mouth.bind((address, 0))
            return EchoReading(interface, target, _comes_back(mouth, ear, target))
        except OSError as exc:
            return EchoReading(interface, target, False, exc.strerror or str(exc))


def multicast_echo(interface: str, address: str, _: str) -> EchoReading:
    """Sends a multicast over one interface and waits for it. The receiver binds to the group on this interface only."""
    with _datagram_socket() as ear, _datagram_socket() as mouth:
        try:
            ear.bind((MULTICAST_GROUP, 0))
            joined = socket.inet_aton(MULTICAST_GROUP) + socket.inet_aton(address)
            ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
            mouth.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
            mouth.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
            mouth.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            mouth.bind((address, 0))
            return EchoReading(interface, MULTICAST_GROUP, _comes_back(mouth, ear, MULTICAST_GROUP))
        except OSError as exc:
            return EchoReading(interface, MULTICAST_GROUP, False, exc.strerror or str(exc))


def _datagram_socket() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def _comes_back(mouth: socket.socket, ear: socket.socket, target: str) -> bool:
    """Whether a datagram arrives. Its content is not JSON, so a node that receives it ignores it."""
    datagram = b"exo-mesh doctor " + secrets.token_bytes(16)
    mouth.sendto(datagram, (target, ear.getsockname()[1]))
    end = time.monotonic() + ECHO_WAIT_S
    while (left := end - time.monotonic()) > 0:
        ear.settimeout(left)
        try:
            if ear.recv(2048) == datagram:
                return True
        except TimeoutError:
            break
    return False


def read_firewall() -> FirewallReading:
    """Reads which firewalls are active, as far as this user may."""
    ufw = _text_of(Path("/etc/ufw/ufw.conf"))
    names = {process.info["name"] for process in psutil.process_iter(["name"])}
    return FirewallReading(
        platform.system(),
        ufw_active="ENABLED=yes" in ufw and _program("ufw") != "",
        firewalld_runs="firewalld" in names,
        nft=_read_nft(),
    )


def _read_nft() -> str:
    program = _program("nft")
    if not program:
        return "absent"
    code, output = _run([program, "list", "ruleset"])
    if code:
        return "unreadable"
    return "drops" if checks.nft_drops(output) else "open"


def read_clocks(state: Mapping[str, Any]) -> tuple[list[ClockReading], int]:
    """Reads the clocks of other peers (the Date header of their API); also returns how many peers were asked."""
    peers = [
        (peer["name"], peer["api_url"])
        for peer in state["view"]["peers"]
        if peer["alive"] and peer["id"] != state["node_id"] and peer.get("api_url")
    ][:MAX_PEERS_ASKED]
    answers = in_time({url: partial(read_clock, name, url) for name, url in peers}, ASK_DEADLINE_S + 1)
    return [answer for answer in answers.values() if isinstance(answer, ClockReading)], len(peers)


def read_clock(name: str, url: str) -> ClockReading:
    """Reads a peer's clock. Raises OSError without an answer. HTTP has whole seconds, so error_s is at least 0.5."""
    anybody = (
        ssl.create_default_context()
    )  # any certificate is accepted: the time is not secret, and a peer's certificate may have another name
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    https = urllib.request.HTTPSHandler(context=anybody)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), https)
    before = time.time()
    with opener.open(f"{url}/healthz", timeout=ASK_DEADLINE_S) as answer:
        date = email.utils.parsedate_to_datetime(answer.headers["Date"])
    after = time.time()
    return ClockReading(name, date.timestamp() + 0.5 - (before + after) / 2, 0.5 + (after - before) / 2)


def read_directories(loaded: LoadedSettings, models_dirs: Sequence[Path]) -> list[DirectoryReading]:
    """Reads the home and models_dirs, where a node looks for models. Directories that the settings name must exist."""
    named = loaded.settings.models_dirs
    return [
        read_home(loaded.settings.home),
        *(_read_models_dir(path, must_exist=path in named) for path in dict.fromkeys(models_dirs)),
    ]


def read_home(home: Path) -> DirectoryReading:
    """Checks that a file can be created in the home or, if it does not exist, in its nearest existing parent."""
    nearest = home
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
        free = shutil.disk_usage(nearest).free
    except OSError as exc:
        return DirectoryReading("home", str(home), home.is_dir(), error=exc.strerror or str(exc))
    return DirectoryReading("home", str(home), home.is_dir(), free_bytes=free)


def _read_models_dir(path: Path, *, must_exist: bool) -> DirectoryReading:
    if not path.is_dir():
        return DirectoryReading("models directory", str(path), False, must_exist)
    try:
        with os.scandir(path):
            free = shutil.disk_usage(path).free
    except OSError as exc:
        return DirectoryReading("models directory", str(path), True, must_exist, exc.strerror or str(exc))
    return DirectoryReading("models directory", str(path), True, must_exist, free_bytes=free)


def read_models(models_dirs: Sequence[Path]) -> dict[str, str]:
    """By name of each model: why its card cannot be read; "" if it can."""
    store = ModelStore(models_dirs, check=check_text_files)
    found = dict(store.found().misnamed)
    for name in store.names():
        try:
            store.card(name)
            found[name] = ""
        except MeshError as exc:
            found[name] = str(exc)
    return found


def read_services() -> checks.ServiceReading:
    """Reads the state of the systemd unit, and the path of nginx."""
    unit = ""
    if Path("/run/systemd/system").is_dir() and _program("systemctl"):
        _, output = _run([_program("systemctl"), "is-active", "exo-mesh.service"])
        unit = output.strip() or "unknown"
    return checks.ServiceReading(unit, _program("nginx"))


def _program(name: str) -> str:
    """The path of a program, "" if absent. Adds the sbin directories, which PATH often lacks without root."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin") or ""


def _run(command: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=ASK_DEADLINE_S, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stdout


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

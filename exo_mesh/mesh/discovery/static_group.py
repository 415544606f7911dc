"""Reads tensor groups from a hostfile in the format of `mlx.launch`, or from the variables that `mlx.launch` sets.

A hostfile is a list of `{"ssh": …, "ips": […], "rdma": […]}`, or `{"backend": …, "envs": […], "hosts": [that list]}`,
or the simple form, a list of `{"host": …, "port": …}` with the port of each node. The order of the hosts is the order
of the ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from exo_mesh.base.printable import reason_of
from exo_mesh.base.small_files import read_small
from exo_mesh.domain.addresses import joined, split
from exo_mesh.domain.device import StaticRank
from exo_mesh.domain.fast_synch import VARIABLE
from exo_mesh.domain.tensor_group import GroupBackend, RdmaMatrix
from exo_mesh.domain.wiring_rules import rdma_obstacle
from exo_mesh.errors import InputError
from exo_mesh.mesh.discovery.hostfile import hosts_in, is_host, is_hostfile

MAX_HOSTS = 32
MAX_FILE_BYTES = 1_000_000
DEFAULT_PORT = 5000
RANK_VARIABLE = "MLX_RANK"
MPI_RANK_VARIABLE = "OMPI_COMM_WORLD_RANK"
MPI_SIZE_VARIABLE = "OMPI_COMM_WORLD_SIZE"
"""Open MPI sets the last two for each process that mpirun starts; older launchers of MLX set them too."""


class StaticHost(msgspec.Struct, frozen=True):
    """One host, by rank. ips: where the others reach it, possibly empty. rdma: devices by rank, empty without RDMA.
    port: of its node."""

    ssh: str
    ips: tuple[str, ...]
    rdma: tuple[str | None, ...] = ()
    port: int = DEFAULT_PORT

    @property
    def name(self) -> str:
        """The ssh host without a leading "user@"."""
        return self.ssh.rpartition("@")[2]

    @property
    def addresses(self) -> tuple[str, ...]:
        """ "host:port" of its node."""
        return tuple(joined(host, self.port) for host in self.ips or (self.name,))


class StaticGroup(msgspec.Struct, frozen=True):
    """The hosts of one tensor group. fast_synch: "on" or "off" if the file sets it, else ""."""

    hosts: tuple[StaticHost, ...]
    backend: GroupBackend
    fast_synch: str = ""

    @property
    def matrix(self) -> RdmaMatrix:
        return tuple(host.rdma for host in self.hosts) if self.backend != "ring" else ()

    def as_mlx(self) -> dict[str, Any]:
        """The group in the format that `mlx.launch --hostfile` reads."""
        envs = [f"{VARIABLE}={int(self.fast_synch == 'on')}"] if self.fast_synch else []
        hosts = [{"ssh": host.ssh, "ips": list(host.ips), "rdma": list(host.rdma)} for host in self.hosts]
        return {"backend": self.backend, "envs": envs, "hosts": hosts}

    def rank(self, rank: int) -> StaticRank:
        """What the host of that rank publishes to the mesh."""
        digest = hashlib.sha256(json.dumps(self.as_mlx(), sort_keys=True).encode()).hexdigest()[:32]
        return StaticRank(digest, rank, len(self.hosts), self.backend, self.matrix[rank] if self.matrix else ())

    def rank_of(self, addresses: Iterable[str], names: Iterable[str]) -> int:
        """The rank of the host with these addresses and names. Raises InputError if no host or several hosts match."""
        own = {*addresses, *(name.lower() for name in names)}
        found = [
            rank
            for rank, host in enumerate(self.hosts)
            if own & {*host.ips, host.name.lower(), host.name.lower().removesuffix(".local")}
        ]
        if len(found) == 1:
            return found[0]
        listing = ", ".join(host.name for host in self.hosts)
        ranks = ", ".join(map(str, found))
        problem = "none of its hosts is this machine" if not found else f"ranks {ranks} are all this machine"
        remedy = "set MLX_RANK to this machine's rank"
        raise InputError(f"the hostfile names {listing}: {problem}; {remedy}", param="hostfile")


def read_hostfile(path: Path, min_hosts: int = 2) -> StaticGroup:
    """Read a hostfile. Raises InputError that names the file, the field and the defect.

    min_hosts: 1 also accepts a file with a single host, which is a list of machines and no tensor group.
    """
    try:
        content = read_small(path, MAX_FILE_BYTES)
    except OSError as exc:
        raise _wrong(str(path), "", f"cannot be read: {exc.strerror}") from exc
    if len(content) > MAX_FILE_BYTES:
        raise _wrong(str(path), "", f"is larger than {MAX_FILE_BYTES} bytes")
    return parse_hostfile(content.decode("utf-8-sig", errors="replace"), str(path), min_hosts)


def parse_hostfile(text: str, where: str, min_hosts: int = 2) -> StaticGroup:
    """Parse the text of a hostfile; see read_hostfile. where: for messages."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise _wrong(where, "", f"is not JSON: {exc}") from exc
    whole = content if isinstance(content, dict) else {"hosts": content}
    key = "hosts" if isinstance(content, dict) else ""
    if unknown := sorted(set(whole) - {"hosts", "backend", "envs"}):
        raise _wrong(where, unknown[0], "is unknown; the known keys are hosts, backend and envs")
    entries = whole.get("hosts")
    if not isinstance(entries, list) or not entries:
        raise _wrong(where, key, "must be a list of hosts")
    if not min_hosts <= len(entries) <= MAX_HOSTS:
        raise _wrong(where, key, f"a tensor group has 2 to {MAX_HOSTS} hosts, not {len(entries)}")
    hosts = _full(entries, where, key) if is_hostfile(entries) else _simple(entries, where, key)
    return StaticGroup(tuple(hosts), _backend(whole, hosts, where, key), _fast_synch(whole, where))


def _full(entries: Sequence[Any], where: str, key: str) -> list[StaticHost]:
    try:
        hosts_in(entries, where, key)  # checks every rule of the format
    except InputError as exc:
        raise InputError(str(exc), param="hostfile") from exc
    return [StaticHost(e["ssh"], tuple(e.get("ips", ())), tuple(e.get("rdma", ()))) for e in entries]


def _simple(entries: Sequence[Any], where: str, key: str) -> list[StaticHost]:
    hosts = []
    for rank, entry in enumerate(entries):
        field = f"{key}[{rank}]"
        if not isinstance(entry, dict) or "host" not in entry:
            raise _wrong(where, field, "must be an object with ssh, ips and rdma, or with host and port")
        host, port = entry["host"], entry.get("port", DEFAULT_PORT)
        if not is_host(host):
            raise _wrong(where, f"{field}.host", "must be a host or an address")
        if type(port) is not int or not 0 < port < 65536:
            raise _wrong(where, f"{field}.port", f"must be a port from 1 to 65535, not {json.dumps(port)}")
        hosts.append(StaticHost(host, (host,) if _is_address(host) else (), port=port))
    return hosts


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _backend(whole: Mapping[str, Any], hosts: Sequence[StaticHost], where: str, key: str) -> GroupBackend:
    has_rdma = any(host.rdma for host in hosts)
    said = whole.get("backend") or ("jaccl" if has_rdma else "ring")
    if said not in get_args(GroupBackend):
        raise _wrong(where, "backend", f"must be one of {', '.join(get_args(GroupBackend))}, not {json.dumps(said)}")
    backend = cast(GroupBackend, said)
    if backend != "ring" and (fault := rdma_obstacle(backend, len(hosts), tuple(host.rdma for host in hosts))):
        raise _wrong(where, key, fault)
    return backend


def _fast_synch(whole: Mapping[str, Any], where: str) -> str:
    """The value of the only variable that a hostfile may set; exo-mesh sets the others itself."""
    envs = whole.get("envs", [])
    if not isinstance(envs, list):
        raise _wrong(where, "envs", 'must be a list of "NAME=VALUE"')
    chosen = ""
    for index, text in enumerate(envs):
        allowed = f"{VARIABLE}=0", f"{VARIABLE}=1"
        if text not in allowed:
            given = json.dumps(text)
            raise _wrong(where, f"envs[{index}]", f"must be {' or '.join(allowed)}, not {given}")
        chosen = "on" if text.endswith("1") else "off"
    return chosen


def launched_group(environ: Mapping[str, str]) -> tuple[StaticGroup, int] | None:
    """The group and this node's rank if `mlx.launch` or a compatible launcher started this process; else None.

    Raises InputError if the variables or files do not define a group.
    """
    rank_text = given_rank(environ)
    devices, hostfile = environ.get("MLX_IBV_DEVICES", ""), environ.get("MLX_HOSTFILE", "")
    if not rank_text or not (devices or hostfile):
        return None
    group: StaticGroup | None
    if devices:
        group = _from_devices(_json_file(devices, "MLX_IBV_DEVICES"), environ)
    else:
        group = _from_hosts(_json_file(hostfile, "MLX_HOSTFILE"))
    if group is None:
        return None
    _check_size(environ, len(group.hosts))
    if not rank_text.isascii() or not rank_text.isdecimal() or int(rank_text) >= len(group.hosts):
        name = RANK_VARIABLE if environ.get(RANK_VARIABLE) else MPI_RANK_VARIABLE
        problem = f"{name} is {json.dumps(rank_text)}, but the group has {len(group.hosts)} ranks"
        raise InputError(problem, param="hostfile")
    return group, int(rank_text)


def given_rank(environ: Mapping[str, str]) -> str:
    """The rank that `mlx.launch` or mpirun gave this process, as text; "" if neither did."""
    return environ.get(RANK_VARIABLE) or environ.get(MPI_RANK_VARIABLE, "")


def _check_size(environ: Mapping[str, str], size: int) -> None:
    """Require that mpirun's number of processes equals the group's number of ranks, if mpirun gave the rank."""
    said = "" if environ.get(RANK_VARIABLE) else environ.get(MPI_SIZE_VARIABLE, "")
    if said and said != str(size):
        problem = f"{MPI_SIZE_VARIABLE} is {json.dumps(said)}, but the group has {size} ranks"
        raise InputError(problem, param="hostfile")


def _json_file(path: str, variable: str) -> Any:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        return json.loads(text) if text.strip() else []
    except (OSError, ValueError) as exc:
        raise InputError(
            f"{variable} names {path}, which cannot be read as JSON: {reason_of(exc)}", param="hostfile"
        ) from exc


def _from_hosts(content: Any) -> StaticGroup | None:
    """The group in `[["ip:port", …], …]`. None for a single rank, for which mlx.launch writes nothing."""
    ranks = content if isinstance(content, list) else []
    if len(ranks) < 2:
        return None
    hosts = []
    for rank, endpoints in enumerate(ranks):
        if not isinstance(endpoints, list) or not endpoints or not all(isinstance(e, str) for e in endpoints):
            raise InputError(f"MLX_HOSTFILE: rank {rank} must be a list of address:port", param="hostfile")
        ips = tuple(dict.fromkeys(split(endpoint)[0] for endpoint in endpoints))
        hosts.append(StaticHost(ips[0], ips))
    return StaticGroup(tuple(hosts), "ring")


def _from_devices(content: Any, environ: Mapping[str, str]) -> StaticGroup:
    """The group of a device matrix; the only host address that is known is the coordinator's."""
    matrix = tuple(tuple(row) if isinstance(row, list) else () for row in content) if isinstance(content, list) else ()
    backend: GroupBackend = "jaccl-ring" if environ.get("MLX_JACCL_RING") == "1" else "jaccl"
    if any(not isinstance(device, str | None) for row in matrix for device in row):
        raise InputError("MLX_IBV_DEVICES: each pair of ranks must have one device name or null", param="hostfile")
    if fault := rdma_obstacle(backend, len(matrix), matrix):
        raise InputError(f"MLX_IBV_DEVICES: {fault}", param="hostfile")
    coordinator = split(environ.get("MLX_JACCL_COORDINATOR", ""))[0]
    if not is_host(coordinator):
        raise InputError("MLX_JACCL_COORDINATOR must be the address:port of rank 0", param="hostfile")
    hosts = [StaticHost(coordinator if rank == 0 else f"rank{rank}", (coordinator,) if rank == 0 else (), row)
             for rank, row in enumerate(matrix)]  # fmt: skip
    return StaticGroup(tuple(hosts), backend)


def _wrong(where: str, field: str, what: str) -> InputError:
    return InputError(f"{where}: {field}: {what}" if field else f"{where}: {what}", param="hostfile")

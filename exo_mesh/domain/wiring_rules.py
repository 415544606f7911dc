"""Checks the addresses and RDMA devices of a tensor group before MLX gets them.

MLX checks little of this in the rank processes: a wrong device or a missing peer makes them wait without end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from ipaddress import AddressValueError, IPv4Address

from exo_mesh.domain.tensor_group import GroupBackend, RdmaMatrix

MAX_MESH_RANKS = 8
"""Most ranks of MLX's JACCL over a full mesh; its source calls the constant MESH_MAX_PEERS."""

MLX_VARIABLES = ("MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR", "MLX_JACCL_RING")
"""The variables by which MLX forms a process's group. A runner gets the variables of its own rank and no others."""

RING_VERBOSE = "MLX_RING_VERBOSE"
"""If set, MLX's ring backend says on standard error how its ranks connect."""

_DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def wiring_obstacle(backend: GroupBackend, endpoints: Sequence[str], rdma: RdmaMatrix = ()) -> str:
    """Names the first rule that is broken, with rank and value; "" if MLX can form this group."""
    if len(endpoints) < 2:
        return f"a tensor group needs at least two ranks, not {len(endpoints)}"
    if backend == "ring":
        listening = list(enumerate(endpoints))
        obstacle = "RDMA devices are listed, but the ring backend uses TCP" if rdma else ""
    else:
        listening = [(0, endpoints[0])]  # the coordinator listens; the others only dial
        obstacle = rdma_obstacle(backend, len(endpoints), rdma)
    return obstacle or _endpoints_obstacle(listening)


def rdma_obstacle(backend: GroupBackend, size: int, rdma: RdmaMatrix) -> str:
    """Says why `size` ranks cannot reach each other over their RDMA devices; "" if they can."""
    if backend == "jaccl" and size > MAX_MESH_RANKS:
        return f"JACCL joins at most {MAX_MESH_RANKS} ranks in a mesh, not {size}"
    if len(rdma) != size:
        return f"{len(rdma)} ranks list RDMA devices, but the group has {size}"
    for rank, row in enumerate(rdma):
        if len(row) != size:
            return f"rank {rank} lists {len(row)} RDMA devices, but the group has {size} ranks"
        if row[rank] is not None:
            return f"rank {rank} lists the RDMA device {row[rank]} for itself, which must be null"
        for other, device in enumerate(row):
            if device is not None and not _DEVICE.fullmatch(device):
                shown = json.dumps(device)
                return f"rank {rank} lists {shown} for rank {other}, which is not the name of an RDMA device"
    return _missing_device(backend, rdma)


def _missing_device(backend: GroupBackend, rdma: RdmaMatrix) -> str:
    size = len(rdma)
    for rank, row in enumerate(rdma):
        if backend == "jaccl-ring":
            needed, why = {(rank - 1) % size, (rank + 1) % size}, "a ring needs both neighbours"
        else:
            needed, why = set(range(size)) - {rank}, "a full mesh needs every pair"
        for other in sorted(needed):
            if row[other] is None:
                return f"no RDMA device is listed from rank {rank} to rank {other}: {why}"
    return ""


def _endpoints_obstacle(listening: Sequence[tuple[int, str]]) -> str:
    taken: dict[str, int] = {}
    for rank, endpoint in listening:
        host, colon, port = endpoint.rpartition(":")
        if not colon or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
            return f"rank {rank} listens at {json.dumps(endpoint)}, which is not address:port"
        try:
            address = IPv4Address(host)
        except AddressValueError:
            return f"rank {rank} listens at {json.dumps(host)}, but MLX's collectives accept IPv4 addresses only"
        if address.is_unspecified or address.is_multicast:
            return f"rank {rank} listens at {host}, which the other ranks cannot dial"
        if endpoint in taken:
            return f"rank {taken[endpoint]} and rank {rank} both listen at {endpoint}"
        taken[endpoint] = rank
    return ""

"""Finds where the collectives of a rank on this machine listen, and checks the wiring that the owner sends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from ipaddress import AddressValueError, IPv4Address

from exo_mesh.domain.addresses import Interface, LinkKind
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.tensor_group import RankWiring, TensorGroup
from exo_mesh.errors import ReservationError
from exo_mesh.machine.interfaces import read_interfaces


async def own_endpoint(plan: Plan, index: int, own_id: str, hosts_of: Callable[[str], Sequence[str]]) -> str:
    """See collective_endpoint; empty for a stage that is no tensor group. hosts_of: the addresses of a peer from this
    node, the best first."""
    stage = plan.stages[index]
    if stage.group is None:
        return ""
    rank = stage.peers.index(own_id)

    def best(peer_id: str) -> str | None:
        return next(iter(hosts_of(peer_id)), None)

    return await asyncio.to_thread(collective_endpoint, stage.group, rank, own_id, best)


def collective_endpoint(group: TensorGroup, rank: int, own_id: str, host_of: Callable[[str], str | None]) -> str:
    """ "address:port" where the collectives of this node's rank would listen: the address on the link to the peers that
    dial it, and a free port, another one each time. Empty for a rank that no peer dials.

    May block for a name look-up. host_of: where this node reaches a peer. Raises ReservationError if this machine has
    no IPv4 address that the others could dial.
    """
    dialers = _dialers(group, rank)
    if not dialers:
        return ""
    hosts = [host for peer_id in dialers if (host := host_of(peer_id)) is not None]
    address = _address_for(hosts, read_interfaces())
    if not address:
        others = ", ".join(peer_id[:8] for peer_id in dialers)
        raise ReservationError(
            f"this node has no IPv4 address that {others} could dial; the collectives of MLX need one", peer_id=own_id
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return f"{address}:{probe.getsockname()[1]}"


def _dialers(group: TensorGroup, rank: int) -> tuple[str, ...]:
    """The peers that dial a rank. All ranks dial rank 0, over RDMA as the coordinator; over TCP each rank is also
    dialled by the one before it."""
    if rank == 0:
        return group.peers[1:]
    return (group.peers[rank - 1],) if group.backend == "ring" else ()


def _address_for(hosts: Iterable[str], interfaces: Iterable[Interface]) -> str:
    """This machine's address on the way to all of these hosts; if the ways differ, an address that does not belong to a
    single cable."""
    found = {_local_address(host) for host in hosts} - {""}
    if len(found) == 1:
        return found.pop()
    usable = [
        one
        for one in interfaces
        if one.ip.version == 4 and not one.ip.is_link_local and not one.kind.comes_last
    ]  # fmt: skip
    usable.sort(key=lambda one: (one.kind is LinkKind.THUNDERBOLT, one.kind, one.address))
    return usable[0].address if usable else min(found, default="")


def _local_address(host: str) -> str:
    """The address from which this machine would reach a host over IPv4; "" if it has none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        address: str = probe.getsockname()[0]
    return "" if IPv4Address(address).is_unspecified else address


def wiring_fault(group: TensorGroup | None, rank: int, wiring: RankWiring | None) -> str:
    """The reason why this is not the wiring of that rank; "" if it is."""
    if group is None:
        return "" if wiring is None else "it is for a tensor group, but the stage is not one"
    if wiring is None:
        return "it is missing: the stage is a tensor group"
    if (wiring.backend, wiring.rank, wiring.size, wiring.rdma) != (group.backend, rank, group.size, group.rdma):
        return (
            f"it is for rank {wiring.rank} of {wiring.size} over {wiring.backend}, not for rank {rank} of {group.size}"
        )
    for endpoint in filter(None, wiring.endpoints):
        try:
            IPv4Address(endpoint.rpartition(":")[0])
        except AddressValueError:
            return f'"{endpoint}" is not an IPv4 address with a port'
    return ""

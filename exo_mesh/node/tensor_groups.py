"""Forming tensor groups: where the collectives of each rank listen, and which peers have failed to be a group.

No peer logs in to another: each answers a reservation with an address and a free port of its own, the owner of the plan
puts them together, and each node starts its own rank with all of them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address

from exo_mesh.discovery.interfaces import read_interfaces
from exo_mesh.domain.addresses import Interface, LinkKind
from exo_mesh.domain.group_placement import FAILED
from exo_mesh.domain.plan import Plan, Seat
from exo_mesh.domain.tensor_group import RankWiring, TensorGroup
from exo_mesh.errors import ReservationError

MAX_FAILURES = 2
"""So often a set of peers may fail to become a group; then its members are pipeline stages."""

FORGET_S = 600.0
"""After this a set of peers that failed may be tried again: somebody may have changed the cable."""

MAX_SETS = 64
"""Sets of peers remembered; the oldest go first."""


def collective_endpoint(group: TensorGroup, rank: int, own_id: str, host_of: Callable[[str], str | None]) -> str:
    """ "address:port" where the collectives of our rank would listen: that of the link to those who dial it, and a port
    that is free now, another one each time. "" for a rank that nobody dials.

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
            f"no IPv4 address here that {others} could dial, and the collectives of MLX speak no other", peer_id=own_id
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return f"{address}:{probe.getsockname()[1]}"


def _dialers(group: TensorGroup, rank: int) -> tuple[str, ...]:
    """All meet at rank 0, over RDMA at its coordinator; over TCP each rank is dialled by the one before it, too."""
    if rank == 0:
        return group.peers[1:]
    return (group.peers[rank - 1],) if group.backend == "ring" else ()


def _address_for(hosts: Iterable[str], interfaces: Iterable[Interface]) -> str:
    """Our address on the way to all of these hosts; if the ways differ, one that does not belong to a single cable."""
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
    """The address by which this machine would speak to a host over IPv4; "" if it would not. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        address: str = probe.getsockname()[0]
    return "" if IPv4Address(address).is_unspecified else address


def wirings(plan: Plan, collectives: Mapping[Seat, str]) -> dict[Seat, RankWiring]:
    """What each rank must know, from where each said it would listen."""
    found = {}
    for seat in plan.seats:
        group = plan.stages[seat.stage].group
        if group is not None:
            endpoints = tuple(collectives[Seat(seat.stage, rank, peer)] for rank, peer in enumerate(group.peers))
            found[seat] = RankWiring(group.backend, seat.rank, endpoints, group.rdma)
    return found


def wiring_fault(group: TensorGroup | None, rank: int, wiring: RankWiring | None) -> str:
    """Why this is not the wiring of that rank; "" if it is."""
    if group is None:
        return "" if wiring is None else "it is for a tensor group, and the stage is none"
    if wiring is None:
        return "it is missing: the stage is a tensor group"
    if (wiring.backend, wiring.rank, wiring.size, wiring.rdma) != (group.backend, rank, group.size, group.rdma):
        return f"it is of rank {wiring.rank} of {wiring.size} by {wiring.backend}, not of rank {rank} of {group.size}"
    for endpoint in filter(None, wiring.endpoints):
        try:
            IPv4Address(endpoint.rpartition(":")[0])
        except AddressValueError:
            return f"{endpoint!r} is no IPv4 address with a port"
    return ""


@dataclass(slots=True)
class _Trouble:
    """failures: 0 for a group that works, and is better off as something else."""

    failures: int
    reason: str
    at: float


class GroupTroubles:
    """Sets of peers that were to be a tensor group, and failed."""

    def __init__(self) -> None:
        self._troubles: dict[frozenset[str], _Trouble] = {}

    def note(self, group: TensorGroup, reason: str, now: float) -> int:
        """The group did not come to be; answers how often that has happened to these peers lately."""
        peers = frozenset(group.peers)
        before = self._troubles.pop(peers, None)
        failures = 1 + (before.failures if before is not None and now - before.at < FORGET_S else 0)
        failures = min(failures, MAX_FAILURES)
        self._troubles[peers] = _Trouble(failures, f"they {FAILED} {failures} times, lastly: {reason}", now)
        while len(self._troubles) > MAX_SETS:
            del self._troubles[next(iter(self._troubles))]
        return failures

    def refuse(self, group: TensorGroup, reason: str, now: float) -> None:
        """It works, and is better off as something else."""
        self._troubles.pop(frozenset(group.peers), None)
        self._troubles[frozenset(group.peers)] = _Trouble(0, reason, now)

    def forget(self, group: TensorGroup) -> None:
        """It has come to be."""
        self._troubles.pop(frozenset(group.peers), None)

    def unfit(self, now: float) -> dict[frozenset[str], str]:
        """The sets of peers that are to be no group for now, and why."""
        return {
            peers: trouble.reason
            for peers, trouble in self._troubles.items()
            if trouble.failures in (0, MAX_FAILURES) and now - trouble.at < FORGET_S
        }

    def failed(self, now: float) -> set[frozenset[str]]:
        """Those among them that cannot be one, whoever insists."""
        return {peers for peers in self.unfit(now) if self._troubles[peers].failures}

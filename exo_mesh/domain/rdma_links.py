"""Finds the peers that an RDMA cable joins, from what each peer reports about its own ports. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from exo_mesh.domain.device import PeerInfo, RdmaPort, StaticRank
from exo_mesh.domain.tensor_group import TensorGroup

MAX_QUEUE_PAIRS = 10
"""Queue pairs of a Thunderbolt device that reports no limit: the eleventh fails with EBUSY on an M4 Pro and an M5 Max
with macOS 26.5.1 (ml-explore/mlx #3162 and #4209). MLX reports the failure only while a group is being formed."""


class RdmaLink(msgspec.Struct, frozen=True):
    """One cable as seen from one end. It is up if the ports at both ends are active and have an RDMA device."""

    peer_id: str
    other_id: str
    port: RdmaPort
    other_port: RdmaPort

    @property
    def is_up(self) -> bool:
        return all(port.active and port.device for port in (self.port, self.other_port))


def cables(peers: Iterable[PeerInfo]) -> list[RdmaLink]:
    """Lists every cable between two of these peers, once from each end, by peer and device."""
    at = {port.uuid: (peer.id, port) for peer in peers for port in peer.rdma_ports if port.uuid}
    found = []
    for peer_id, port in at.values():
        other_id, other_port = at.get(port.other_uuid, ("", None))
        if other_port is not None and other_port.other_uuid == port.uuid and other_id != peer_id:
            found.append(RdmaLink(peer_id, other_id, port, other_port))
    return sorted(found, key=lambda link: (link.peer_id, link.other_id, link.port.device))


def bridge_cycle(peers: Iterable[PeerInfo]) -> list[str]:
    """Ids of the peers whose cables and Thunderbolt Bridges form a loop of more than two peers; [] if there is no loop.

    In such a loop broadcasts circulate without end. The result is what remains after peers with fewer than two bridged
    neighbours are removed repeatedly.
    """
    neighbours: dict[str, set[str]] = defaultdict(set)
    for link in cables(peers):
        if link.port.bridged and link.other_port.bridged:
            neighbours[link.peer_id].add(link.other_id)
    while loose := [peer for peer, others in neighbours.items() if len(others) < 2]:
        for peer in loose:
            for other in neighbours.pop(peer):
                if other in neighbours:
                    neighbours[other].discard(peer)
    return sorted(neighbours)


def rdma_devices(peers: Iterable[PeerInfo]) -> dict[tuple[str, str], str]:
    """By (peer, other): the device by which `peer` reaches `other`, over the first cable that is up, or by hostfile."""
    peers = list(peers)
    found: dict[tuple[str, str], str] = {}
    for link in cables(peers):
        if link.is_up:
            found.setdefault((link.peer_id, link.other_id), link.port.device)
    for ranks in static_groups(peers):
        for peer in ranks:
            row = peer.static_rank.rdma if peer.static_rank else ()
            found.update({(peer.id, other.id): device for other, device in zip(ranks, row, strict=False) if device})
    return found


def static_groups(peers: Iterable[PeerInfo]) -> list[list[PeerInfo]]:
    """Lists the groups from hostfiles whose ranks are all present, each in the order of its ranks."""
    by_group: dict[str, dict[int, PeerInfo]] = defaultdict(dict)
    for peer in sorted(peers, key=lambda peer: peer.id):
        rank = peer.static_rank
        if rank is not None and 0 <= rank.rank < rank.size:
            by_group[rank.group].setdefault(rank.rank, peer)
    return [
        [ranks[index] for index in sorted(ranks)]
        for _, ranks in sorted(by_group.items())
        if len(ranks) == _size(ranks[min(ranks)].static_rank)
    ]


def _size(rank: StaticRank | None) -> int:
    return rank.size if rank is not None else 0


def queue_pairs_needed(group: TensorGroup) -> Counter[tuple[str, str]]:
    """By (peer, device): how many queue pairs the ranks of a group use. Empty without RDMA.

    A mesh uses one per other rank, a ring one per neighbour: with two ranks, both neighbours are the same rank and it
    uses two.
    """
    needed: Counter[tuple[str, str]] = Counter()
    for rank, row in enumerate(group.rdma):
        neighbours = ((rank - 1) % group.size, (rank + 1) % group.size)
        reached = neighbours if group.backend == "jaccl-ring" else range(group.size)
        needed.update((group.peers[rank], device) for other in reached if (device := row[other]))
    return needed


def queue_pairs_left(peers: Iterable[PeerInfo], formed: Iterable[TensorGroup]) -> dict[tuple[str, str], int]:
    """By (peer, device): how many queue pairs a device has left beside the groups that exist already."""
    left = {
        (peer.id, port.device): port.max_queue_pairs or MAX_QUEUE_PAIRS
        for peer in peers
        for port in peer.rdma_ports
        if port.device
    }
    for group in formed:
        for key, number in queue_pairs_needed(group).items():
            left[key] = left.get(key, MAX_QUEUE_PAIRS) - number
    return left


def broken_cable(group: TensorGroup, peers: Iterable[PeerInfo]) -> str:
    """Names a port of an RDMA group that its peer reports as down; "" if none is. Unreported ports count as up."""
    ports = {peer.id: {port.device: port for port in peer.rdma_ports} for peer in peers}
    for peer_id, row in zip(group.peers, group.rdma, strict=False):
        for other_id, device in zip(group.peers, row, strict=True):
            port = ports[peer_id].get(device) if device and ports.get(peer_id) else None
            if device and ports.get(peer_id) and (port is None or not port.active):
                return f"the port {device} of {peer_id[:8]} to {other_id[:8]} is down"
    return ""

"""Finds the peers that could form one stage as a tensor group, and explains why others could not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Literal, cast

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.footprint import gigabytes
from exo_mesh.domain.rdma_links import queue_pairs_needed
from exo_mesh.domain.ring_candidates import Candidate
from exo_mesh.domain.tensor_group import GroupBackend, TensorGroup
from exo_mesh.domain.wiring_rules import MAX_MESH_RANKS
from exo_mesh.errors import InputError, PlacementError

WishedBackend = Literal["auto", "ring", "jaccl", "jaccl-ring"]
"""auto: JACCL if there is RDMA between the peers. Else no group is made, unless GroupFacts.tcp_fallback allows it."""

MAX_MEMBERS = 12
"""Most peers among which groups are searched, those with the most memory: more were never cabled together."""

MAX_GROUPINGS = 64


class GroupWish(msgspec.Struct, frozen=True):
    """A request for tensor groups. size: None lets placement decide, 1 forbids groups, N asks for a group of N peers.
    members: the requested groups, each as peer ids with the leader first."""

    size: int | None = None
    members: tuple[tuple[str, ...], ...] = ()
    backend: WishedBackend = "auto"

    @property
    def is_forced(self) -> bool:
        return bool(self.members) or (self.size or 1) > 1


class GroupFacts(msgspec.Struct, frozen=True):
    """Facts about the peers that grouping needs. rdma: by (peer, other), the device by which `peer` reaches `other`,
    where a cable with active ports joins them. obstacle: why an engine cannot split the model over that many ranks,
    with the numbers, or "". unfit: sets of peers that must not form a group unless it is requested by name or size, and
    why. tcp_fallback: peers without RDMA may use TCP if the group was requested. queue_pairs: by (peer, device), how
    many are left for another group; a device that is not listed has enough."""

    rdma: Mapping[tuple[str, str], str] = msgspec.field(default_factory=dict)
    obstacle: Callable[[str, int], str] = lambda engine, size: f"engine {engine} cannot form tensor groups"
    unfit: Mapping[frozenset[str], str] = msgspec.field(default_factory=dict)
    tcp_fallback: bool = False
    queue_pairs: Mapping[tuple[str, str], int] = msgspec.field(default_factory=dict)


def joined(members: Sequence[Candidate], backend: GroupBackend, rdma: Mapping[tuple[str, str], str]) -> Candidate:
    """Joins the members to one candidate, led by the first; each rank can reserve what the smallest member has."""
    peers = tuple(member.peer_id for member in members)
    matrix = (
        () if backend == "ring" else tuple(tuple(rdma.get((a, b)) if a != b else None for b in peers) for a in peers)
    )
    speeds = [member.s_per_gb for member in members]
    return replace(
        members[0],
        usable_bytes=min(member.usable_bytes for member in members),
        s_per_gb=max(s or 0.0 for s in speeds) / len(members) if all(speeds) else None,
        others=(),
        group=TensorGroup(backend, peers, matrix),
        has_files=all(member.has_files for member in members),
    )


def group_fault(members: Sequence[Candidate], wish: GroupWish, facts: GroupFacts) -> str:
    """Why these peers cannot be a tensor group; "" if they can."""
    peers = frozenset(member.peer_id for member in members)
    if not wish.is_forced and peers in facts.unfit:
        return facts.unfit[peers]
    builds = {member.build for member in members}
    if len(builds) > 1:
        return f"their engines differ: {', '.join(sorted(builds))}"
    if obstacle := facts.obstacle(members[0].engine, len(members)):
        return obstacle
    backend = backend_for(members, wish, facts)
    return _queue_pair_fault(members, backend, facts) if backend else _missing_cables(members, wish.backend, facts)


def _queue_pair_fault(members: Sequence[Candidate], backend: GroupBackend, facts: GroupFacts) -> str:
    """Names the device and peer with too few queue pairs left for this group; "" if every device has enough."""
    group = joined(members, backend, facts.rdma).group
    for (peer_id, device), needed in queue_pairs_needed(group).items() if group else ():
        left = facts.queue_pairs.get((peer_id, device), needed)
        if left < needed:
            return (
                f"{device} of {peer_id[:8]} has {max(left, 0)} queue pairs left and this group needs {needed}: other "
                "tensor groups use the same cable; stop one of them"
            )
    return ""


def backend_for(members: Sequence[Candidate], wish: GroupWish, facts: GroupFacts) -> GroupBackend | None:
    """The backend by which these peers can reach each other; None if there is none as requested."""
    wished = wish.backend
    if wished == "ring":
        return "ring"
    if wished in ("auto", "jaccl") and len(members) <= MAX_MESH_RANKS and not _gaps(members, facts, ring=False):
        return "jaccl"
    if wished == "jaccl-ring" and not _gaps(members, facts, ring=True):
        return "jaccl-ring"
    return "ring" if wish.is_forced and facts.tcp_fallback else None


def _gaps(members: Sequence[Candidate], facts: GroupFacts, *, ring: bool) -> list[tuple[str, str]]:
    """Pairs that need a cable and have none."""
    peers = [member.peer_id for member in members]
    pairs = zip(peers, [*peers[1:], peers[0]], strict=True) if ring else combinations(peers, 2)
    return [(a, b) for a, b in pairs if (a, b) not in facts.rdma or (b, a) not in facts.rdma]


def _missing_cables(members: Sequence[Candidate], wished: WishedBackend, facts: GroupFacts) -> str:
    gaps = _gaps(members, facts, ring=wished == "jaccl-ring")
    if not gaps:
        return f"JACCL joins at most {MAX_MESH_RANKS} peers in a mesh, not {len(members)}"
    listing = ", ".join(f"{a[:8]} and {b[:8]}" for a, b in gaps[:3]) + (" and others" if len(gaps) > 3 else "")
    shape = "a ring needs a cable to each neighbour" if wished == "jaccl-ring" else "a full mesh joins every pair"
    return (
        f"no RDMA link is up between {listing} ({shape}); exo-mesh doctor rdma says what is missing, and "
        "--group-backend ring works without RDMA"
    )


def groupings(candidates: Sequence[Candidate], wish: GroupWish, facts: GroupFacts) -> list[list[Candidate]]:
    """Returns candidate lists with some peers joined to groups, in the order in which to try them.

    Raises PlacementError or InputError if groups were requested by name or size and cannot be formed.
    """
    if wish.size == 1:
        return []
    if wish.is_forced:
        size = wish.size or max(len(group) for group in wish.members)
        candidates = [_able(candidate, size, facts) for candidate in candidates]
    if wish.members:
        return [joined_as_named(candidates, wish, facts)]
    roomiest = sorted(candidates, key=lambda c: (-c.usable_bytes, c.peer_id))[:MAX_MEMBERS]
    sizes = [wish.size] if wish.size else range(2, len(roomiest) + 1)
    found: list[list[Candidate]] = []
    for size in sizes:
        good = [group for group in _sets(roomiest, size) if not group_fault(group, wish, facts)]
        good.sort(key=lambda group: (-min(c.usable_bytes for c in group), [c.peer_id for c in group]))
        found += [_with([group], candidates, wish, facts) for group in good[:MAX_GROUPINGS]]
        if len(several := _disjoint(good)) > 1:
            found.append(_with(several, candidates, wish, facts))
    if wish.size and not found:
        raise _no_group(candidates, wish, facts)
    return found[:MAX_GROUPINGS]


def _able(candidate: Candidate, size: int, facts: GroupFacts) -> Candidate:
    """Switches a peer to the first of its engines that can form such a group, if it has one."""
    for engine in (candidate.engine, *candidate.others):
        if size > 1 and not facts.obstacle(engine, size):
            return candidate.running(engine)
    return candidate


def _sets(candidates: Sequence[Candidate], size: int) -> Iterable[list[Candidate]]:
    """Leaders are the lowest ids, so that every peer chooses the same."""
    return ([*group] for group in combinations(sorted(candidates, key=lambda c: c.peer_id), size))


def _disjoint(groups: Iterable[list[Candidate]]) -> list[list[Candidate]]:
    taken: set[str] = set()
    chosen = []
    for group in groups:
        peers = {member.peer_id for member in group}
        if not peers & taken:
            taken |= peers
            chosen.append(group)
    return chosen


def _with(
    groups: Sequence[Sequence[Candidate]], candidates: Sequence[Candidate], wish: GroupWish, facts: GroupFacts
) -> list[Candidate]:
    """Joins the groups and puts them first: the ring starts at the group with the most memory."""
    taken = {member.peer_id for group in groups for member in group}
    merged = [joined(group, cast(GroupBackend, backend_for(group, wish, facts)), facts.rdma) for group in groups]
    required = [replace(group, required=wish.is_forced) for group in merged]
    return [*required, *(candidate for candidate in candidates if candidate.peer_id not in taken)]


def joined_as_named(
    candidates: Sequence[Candidate], wish: GroupWish, facts: GroupFacts, engine: str | None = None
) -> list[Candidate]:
    """Joins the groups that a wish names. engine: what their members must use, None for their own choice.

    Raises InputError for peers that are absent or named twice; PlacementError for peers that cannot be a group.
    """
    by_id = {candidate.peer_id: candidate for candidate in candidates}
    names = [peer_id for group in wish.members for peer_id in group]
    if len(set(names)) != len(names) or any(len(group) < 2 for group in wish.members):
        raise InputError("each tensor group needs two peers or more, and no peer may be in two groups", param="groups")
    absent = [peer_id[:8] for peer_id in names if peer_id not in by_id]
    if absent:
        known = ", ".join(sorted(peer_id[:8] for peer_id in by_id)) or "none"
        raise InputError(f"{', '.join(absent)} cannot take part (peers that can: {known})", param="groups")
    groups = [[by_id[peer_id].running(engine or by_id[peer_id].engine) for peer_id in group] for group in wish.members]
    for group in groups:
        if fault := group_fault(group, wish, facts):
            raise refused(group, fault)
    return _with(groups, candidates, wish, facts)


def refused(members: Sequence[Candidate], fault: str) -> PlacementError:
    """The error for peers that cannot form the requested group."""
    listing = ", ".join(f"{member.peer_id[:8]} {gigabytes(member.usable_bytes)}" for member in members)
    remedy = "ask for another size, name other peers, or turn groups off (tensor_group: 1)"
    return _refusal(members, len(members), f"{listing} cannot form one: {fault}", remedy)


def _no_group(candidates: Sequence[Candidate], wish: GroupWish, facts: GroupFacts) -> PlacementError:
    size = wish.size or 2
    roomiest = sorted(candidates, key=lambda c: (-c.usable_bytes, c.peer_id))
    if len(roomiest) < size:
        fault = f"{size - len(roomiest)} more with the model and an engine for it are needed"
        remedy = "start more peers, or ask for a smaller group"
        return _refusal(roomiest, size, f"{len(roomiest)} can take part: {fault}", remedy)
    return refused(roomiest[:size], group_fault(sorted(roomiest[:size], key=lambda c: c.peer_id), wish, facts))


def _refusal(members: Sequence[Candidate], size: int, why: str, remedy: str) -> PlacementError:
    return PlacementError(
        f"a tensor group of {size} was asked for, and {why}; {remedy}",
        reason="tensor_group",
        have=[(member.peer_id, member.usable_bytes) for member in members],
        remedy=remedy,
    )

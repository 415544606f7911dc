"""Lists the rings that peers and engines could form, the most wanted ring first: with one engine, else with several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.fitting import StepTimes, largest_that_fit
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.shard import KeptLayers
from exo_mesh.domain.tensor_group import TensorGroup, sharded

DEFAULT_HOP_S = 0.0005
"""Seconds one way between two peers whose link was not measured: a LAN's round trip is about a millisecond."""

FEW_PEERS = 4
"""With up to this many measured peers every ring is compared; with more, only the fastest and largest per size."""

MAX_RING_SIZES = 16
"""With measured speeds, rings are compared up to this many peers above the fewest that were asked for: each further hop
costs time, and no model is known to gain from more."""

MAX_BUILDS = 6
"""Most engine builds among which mixed rings are searched: 2^6 sets, and no mesh is known to use more."""

MIXING = ("auto", "never", "always")
"""auto: a ring has one engine if such a ring fits, else several. never: one engine. always: several engines."""


class Candidate(msgspec.Struct, frozen=True):
    """A peer that has the model on disk, the memory that it could reserve now, and the engine that it would use.

    s_per_gb: measured time of a decode step per 1e9 bytes of weights, or None. others: further engines that could run
    the model there, best first. builds: the build of each engine there, which decides how it computes. group: set if
    the candidate is several peers that would form one stage, each with the memory of the smallest of them. required:
    every ring must contain it. tier: 0 for the most wanted peers; those of a higher tier take part only if the others
    cannot hold the model. has_files: False for a peer that would fetch files of the model first.
    """

    peer_id: str
    usable_bytes: int
    engine: str
    s_per_gb: float | None = None
    others: tuple[str, ...] = ()
    builds: tuple[tuple[str, str], ...] = ()
    group: TensorGroup | None = None
    required: bool = False
    tier: int = 0
    has_files: bool = True

    @property
    def size(self) -> int:
        """Number of peers."""
        return 1 if self.group is None else self.group.size

    @property
    def members(self) -> tuple[str, ...]:
        """The peers, by rank if they form a group."""
        return (self.peer_id,) if self.group is None else self.group.peers

    @property
    def share_bytes(self) -> int:
        """Weight when layers are divided by memory. Every rank of a group holds a part of each tensor, so the smallest
        rank limits all of them."""
        return self.size * self.usable_bytes

    @property
    def build(self) -> str:
        """The build of the engine that the peer would use."""
        return next((build for engine, build in self.builds if engine == self.engine), self.engine)

    def running(self, engine: str) -> Candidate:
        """Returns the same peer with another of its engines, whose speed is unknown."""
        if engine == self.engine:
            return self
        others = tuple(name for name in (self.engine, *self.others) if name != engine)
        return replace(self, engine=engine, others=others, s_per_gb=None)


def without(candidate: Candidate, engine: str) -> Candidate | None:
    """Returns the peer without one of its engines; None if it has no other."""
    if candidate.engine == engine:
        if not candidate.others:
            return None
        candidate = candidate.running(candidate.others[0])
    return replace(candidate, others=tuple(name for name in candidate.others if name != engine))


class Surroundings(msgspec.Struct, frozen=True):
    """What placement knows besides model and peers; the defaults suit a model that may be cut anywhere.

    cards: the model as each engine holds it, where known. hop_s: measured seconds one way between two peers. unmixable:
    for two builds of engines, why they must not share a ring of this model. even: give all peers of a ring the same
    number of layers, as far as these fit, instead of dividing the layers by memory or speed. on_disk: by peer, what it
    has on its disk of this model.
    """

    cards: Mapping[str, ModelCard] = msgspec.field(default_factory=dict)
    hop_s: Mapping[tuple[str, str], float] = msgspec.field(default_factory=dict)
    unmixable: Mapping[frozenset[str], str] = msgspec.field(default_factory=dict)
    even: bool = False
    on_disk: Mapping[str, Sequence[KeptLayers]] = msgspec.field(default_factory=dict)

    def held(self, card: ModelCard, engine: str) -> ModelCard:
        """The model as an engine holds it; as in the files until that is known."""
        return self.cards.get(engine, card)

    def held_by(self, card: ModelCard, peer: Candidate) -> ModelCard:
        """The model as the peer's engine holds it; for a tensor group, as each of its ranks holds it."""
        return sharded(self.held(card, peer.engine), peer.size)

    def ring_hops(self, peer_ids: Sequence[str]) -> StepTimes:
        """Time of all hops of a lap; a ring of one peer has none."""
        if len(peer_ids) < 2:
            return StepTimes(0.0, 0.0)
        hops = [self._hop(a, b) for a, b in zip(peer_ids, [*peer_ids[1:], peer_ids[0]], strict=True)]
        return StepTimes(sum(hops), max(hops))

    def _hop(self, one: str, other: str) -> float:
        return self.hop_s.get((one, other), self.hop_s.get((other, one), DEFAULT_HOP_S))


NOTHING_KNOWN = Surroundings()


def by_tier(candidates: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    """Yields the candidates to try in turn: the lowest tier, then with each further tier, at last all."""
    for tier in sorted({candidate.tier for candidate in candidates}):
        yield [candidate for candidate in candidates if candidate.tier <= tier]


Group = list[Candidate]
"""Peers that may share a ring in any combination, the most wanted first."""


def attempts(ordered: Sequence[Candidate], mixing: str, around: Surroundings) -> Iterator[list[Group]]:
    """Yields groups to form rings from; a later attempt counts only if no ring of an earlier one fits.

    First rings of one engine, where each peer uses its first choice; then rings of several engines; then rings of one
    engine that is not every peer's first choice.
    """
    first_choice = _groups_of_one_engine(ordered)
    if mixing != "always":
        yield first_choice
    if mixing != "never":
        yield _mixed_groups(ordered, around)
    if mixing != "always":
        engines = dict.fromkeys(engine for candidate in ordered for engine in (candidate.engine, *candidate.others))
        groups = [[c.running(e) for c in ordered if e in (c.engine, *c.others)] for e in engines]
        yield [group for group in groups if group not in first_choice]


def num_engines(group: Iterable[Candidate]) -> int:
    return len({candidate.engine for candidate in group})


def rings_to_try(card: ModelCard, groups: Sequence[Group], policy: str, min_peers: int) -> Iterator[list[Candidate]]:
    """Yields rings as peers in ring order, the most wanted ring first."""
    sizes = range(max(1, min_peers), max((len(group) for group in groups), default=0) + 1)
    for size in reversed(sizes) if policy == "throughput" else sizes:
        for group in groups:
            if size > min(len(group), card.num_layers):
                continue
            yield from _rings_of(group, size)


def rings_by_speed(card: ModelCard, groups: Sequence[Group], min_peers: int) -> Iterator[list[Candidate]]:
    """Yields rings as peers in ring order: every ring of few peers; of many peers only the fastest and the roomiest."""
    fewest = max(1, min_peers)
    for group in groups:
        quickest = sorted(group, key=lambda c: (c.s_per_gb or 0.0, -c.usable_bytes, c.peer_id))
        roomiest = sorted(group, key=lambda c: (-c.usable_bytes, c.peer_id))
        for size in range(fewest, min(len(group), card.num_layers, fewest + MAX_RING_SIZES) + 1):
            if len(group) <= FEW_PEERS:
                rings = [list(peers) for peers in combinations(group, size)]
            else:
                rings = [[peer for peer in group if peer in wanted] for wanted in (quickest[:size], roomiest[:size])]
            yield from (ring for ring in rings if is_meant(group, ring))


def _rings_of(group: Group, size: int) -> Iterator[list[Candidate]]:
    rings = [group[:size]]
    # the proposer comes first, and may be the small peer that makes a ring of this size impossible
    largest = largest_that_fit(size, [candidate.share_bytes for candidate in group])
    if len(largest) == size and 0 not in largest:
        rings.append([group[rank] for rank in largest])
    if num_engines(group) > 1:
        firsts = {candidate.engine: candidate for candidate in reversed(group)}.values()  # the first of each engine
        rest = [candidate for candidate in group if candidate not in firsts]
        chosen = [*firsts, *rest][: max(size, len(firsts))]
        rings.append([candidate for candidate in group if candidate in chosen])
    yield from (ring for ring in rings if len(ring) == size and is_meant(group, ring))


def is_meant(group: Group, ring: Sequence[Candidate]) -> bool:
    """Whether a ring belongs to its group: it contains all required peers, and a mixed group yields only mixed rings,
    because rings of one engine come from groups of their own."""
    if any(candidate.required and candidate not in ring for candidate in group):
        return False
    return num_engines(group) == 1 or num_engines(ring) > 1


def _groups_of_one_engine(ordered: Sequence[Candidate]) -> list[Group]:
    engines = dict.fromkeys(candidate.engine for candidate in ordered)
    return [[candidate for candidate in ordered if candidate.engine == engine] for engine in engines]


def _mixed_groups(ordered: Sequence[Candidate], around: Surroundings) -> list[Group]:
    """Groups of peers whose builds may all share a ring, few engines before many."""
    engine_of = {candidate.build: candidate.engine for candidate in ordered}
    builds = list(engine_of)[:MAX_BUILDS]
    groups = []
    for size in range(2, len(builds) + 1):
        for chosen in combinations(builds, size):
            mixed = len({engine_of[build] for build in chosen}) > 1
            if mixed and not any(frozenset(pair) in around.unmixable for pair in combinations(chosen, 2)):
                groups.append([candidate for candidate in ordered if candidate.build in chosen])
    return groups

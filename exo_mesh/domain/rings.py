"""Which peers could form a ring with which engines, the most wanted ring first: of one engine, else of several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from exo_mesh.domain.fitting import StepTimes
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.partition import largest_that_fit
from exo_mesh.domain.tensor_group import TensorGroup, sharded

DEFAULT_HOP_S = 0.0005
"""One way between two peers whose link was not measured: a LAN's round trip is about a millisecond."""

FEW_PEERS = 4
"""Of so many measured peers every ring is weighed; of more only the quickest and the largest ones of each size."""

MAX_RING_SIZES = 16
"""With measured speeds every size of ring is weighed, up to this many more than the fewest peers that hold the model:
each further hop costs time, and no model is known to gain from more."""

MAX_BUILDS = 6
"""Builds of engines among which mixed rings are looked for: 2^6 sets, and no mesh is known to have more in use."""

MIXING = ("auto", "never", "always")
"""auto: a ring is of one engine if there is one that fits, else of several. always: of several, as somebody asked."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that has the model on disk, what it could reserve now, and the engine it would run it with.

    s_per_gb: what one of its decode steps takes per 1e9 bytes of weights, if that was measured. others: further engines
    that could run it there, best first. builds: what decides how each engine computes there, by engine.
    group: set if it is several peers that would be one stage, each with the memory of the smallest of them.
    required: no ring without it will do.
    """

    peer_id: str
    usable_bytes: int
    engine: str
    s_per_gb: float | None = None
    others: tuple[str, ...] = ()
    builds: tuple[tuple[str, str], ...] = ()
    group: TensorGroup | None = None
    required: bool = False

    @property
    def size(self) -> int:
        """How many peers it is."""
        return 1 if self.group is None else self.group.size

    @property
    def share_bytes(self) -> int:
        """What it counts for when layers are dealt out by memory: every rank holds a part of each tensor, so the
        smallest rank bounds them all."""
        return self.size * self.usable_bytes

    @property
    def build(self) -> str:
        """That of the engine it would use."""
        return next((build for engine, build in self.builds if engine == self.engine), self.engine)

    def running(self, engine: str) -> Candidate:
        """The same peer with another of its engines, whose speed is not known."""
        if engine == self.engine:
            return self
        others = tuple(name for name in (self.engine, *self.others) if name != engine)
        return replace(self, engine=engine, others=others, s_per_gb=None)


def without(candidate: Candidate, engine: str) -> Candidate | None:
    """The peer if it must not use one of its engines; None if it has no other."""
    if candidate.engine == engine:
        if not candidate.others:
            return None
        candidate = candidate.running(candidate.others[0])
    return replace(candidate, others=tuple(name for name in candidate.others if name != engine))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What placement may know besides model and peers; the defaults suit a model that may be cut anywhere.

    cards: the model as each engine holds it, where that was found out. hop_s: seconds one way between two peers, where
    measured. unmixable: for two builds of engines, why they must not share a ring of this model.
    """

    cards: Mapping[str, ModelCard] = field(default_factory=dict)
    hop_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    unmixable: Mapping[frozenset[str], str] = field(default_factory=dict)

    def held(self, card: ModelCard, engine: str) -> ModelCard:
        """The model as an engine holds it; as the files have it until that is known."""
        return self.cards.get(engine, card)

    def held_by(self, card: ModelCard, peer: Candidate) -> ModelCard:
        """The model as its engine holds it there; of a tensor group, as each of its ranks does."""
        return sharded(self.held(card, peer.engine), peer.size)

    def ring_hops(self, peer_ids: Sequence[str]) -> StepTimes:
        """All hops of a lap; a ring of one has none."""
        if len(peer_ids) < 2:
            return StepTimes(0.0, 0.0)
        hops = [self._hop(a, b) for a, b in zip(peer_ids, [*peer_ids[1:], peer_ids[0]], strict=True)]
        return StepTimes(sum(hops), max(hops))

    def _hop(self, one: str, other: str) -> float:
        return self.hop_s.get((one, other), self.hop_s.get((other, one), DEFAULT_HOP_S))


NOTHING_KNOWN = Surroundings()

Group = list[Candidate]
"""Peers of which any may share a ring, in the order in which they are wanted."""


def attempts(ordered: Sequence[Candidate], mixing: str, around: Surroundings) -> Iterator[list[Group]]:
    """Groups to make rings of; those of a later attempt only if no ring of an earlier one fits.

    First rings of one engine, each peer with the one that it would choose; then rings of several; then rings of one
    engine which is not everybody's first choice.
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
    """Peers in ring order, the most wanted ring first."""
    sizes = range(max(1, min_peers), max((len(group) for group in groups), default=0) + 1)
    for size in reversed(sizes) if policy == "throughput" else sizes:
        for group in groups:
            if size > min(len(group), card.num_layers):
                continue
            yield from _rings_of(group, size)


def rings_by_speed(card: ModelCard, groups: Sequence[Group], min_peers: int) -> Iterator[list[Candidate]]:
    """Peers in ring order: every ring of few peers, the quickest and the roomiest of many."""
    fewest = max(1, min_peers)
    for group in groups:
        quickest = sorted(group, key=lambda c: (c.s_per_gb or 0.0, -c.usable_bytes, c.peer_id))
        roomiest = sorted(group, key=lambda c: (-c.usable_bytes, c.peer_id))
        for size in range(fewest, min(len(group), card.num_layers, fewest + MAX_RING_SIZES) + 1):
            if len(group) <= FEW_PEERS:
                rings = [list(peers) for peers in combinations(group, size)]
            else:
                rings = [[peer for peer in group if peer in wanted] for wanted in (quickest[:size], roomiest[:size])]
            yield from (ring for ring in rings if _is_meant(group, ring))


def _rings_of(group: Group, size: int) -> Iterator[list[Candidate]]:
    rings = [group[:size]]
    # the proposer's own device may be the small one that makes a ring of this size impossible
    largest = largest_that_fit(size, [candidate.share_bytes for candidate in group])
    if len(largest) == size and 0 not in largest:
        rings.append([group[rank] for rank in largest])
    if num_engines(group) > 1:
        firsts = {candidate.engine: candidate for candidate in reversed(group)}.values()  # the first of each engine
        rest = [candidate for candidate in group if candidate not in firsts]
        chosen = [*firsts, *rest][: max(size, len(firsts))]
        rings.append([candidate for candidate in group if candidate in chosen])
    yield from (ring for ring in rings if len(ring) == size and _is_meant(group, ring))


def _is_meant(group: Group, ring: Sequence[Candidate]) -> bool:
    """A mixed group is for mixed rings: those of one engine are in groups of their own. And what is required is in."""
    if any(candidate.required and candidate not in ring for candidate in group):
        return False
    return num_engines(group) == 1 or num_engines(ring) > 1


def _groups_of_one_engine(ordered: Sequence[Candidate]) -> list[Group]:
    engines = dict.fromkeys(candidate.engine for candidate in ordered)
    return [[candidate for candidate in ordered if candidate.engine == engine] for engine in engines]


def _mixed_groups(ordered: Sequence[Candidate], around: Surroundings) -> list[Group]:
    """Peers whose builds may all share a ring, few engines before many."""
    engine_of = {candidate.build: candidate.engine for candidate in ordered}
    builds = list(engine_of)[:MAX_BUILDS]
    groups = []
    for size in range(2, len(builds) + 1):
        for chosen in combinations(builds, size):
            mixed = len({engine_of[build] for build in chosen}) > 1
            if mixed and not any(frozenset(pair) in around.unmixable for pair in combinations(chosen, 2)):
                groups.append([candidate for candidate in ordered if candidate.build in chosen])
    return groups

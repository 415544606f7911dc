"""Decides whether placement joins peers to tensor groups: by request, for fewer stages, or by measured times. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.grouping import GroupFacts, GroupWish, groupings, joined_as_named
from exo_mesh.domain.pinning import Pin
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.ring_candidates import Candidate
from exo_mesh.domain.tensor_group import TensorGroup
from exo_mesh.errors import PlacementError

FAILED = "failed to become a tensor group"
"""Marks the reason of an instance whose peers run as stages although tensor groups were requested."""

Attempt = Callable[[Sequence[Candidate], int], Plan]
"""Makes a plan from (candidates, fewest stages). Raises PlacementError if there is none."""


def place_grouped(
    candidates: Sequence[Candidate], wish: GroupWish, facts: GroupFacts, min_peers: int, attempt: Attempt
) -> Plan:
    """Makes the plan with the requested groups, or with a group where that takes no more peers than a plain pipeline.

    Without a request, groups are tried only if the plain plan needs several stages. Raises PlacementError if there is
    no plan, or none with such groups; InputError for groups that make no sense.
    """
    if wish.is_forced:
        return _forced(candidates, wish, facts, min_peers, attempt)
    plain = attempt(candidates, min_peers)
    if len(plain.stages) == 1 or wish.size == 1 or not (facts.rdma or wish.backend == "ring"):
        return plain
    for grouping in groupings(candidates, wish, facts):
        try:
            plan = attempt(grouping, _stages(min_peers, grouping))
        except PlacementError:
            continue
        if groups_of(plan) and min_peers <= len(plan.member_ids) <= len(plain.stages):
            return plan
    return plain


def _forced(
    candidates: Sequence[Candidate], wish: GroupWish, facts: GroupFacts, min_peers: int, attempt: Attempt
) -> Plan:
    refusal: PlacementError | None = None
    for grouping in groupings(candidates, wish, facts):
        try:
            return attempt(grouping, _stages(min_peers, grouping))
        except PlacementError as exc:
            refusal = refusal or exc
    assert refusal is not None, "groupings never returns an empty list for a forced wish"
    raise refusal


def _stages(min_peers: int, grouping: Sequence[Candidate]) -> int:
    """The fewest stages that contain `min_peers` peers, given these groups."""
    return max(1, min_peers - sum(one.size - 1 for one in grouping))


def groups_of(plan: Plan) -> list[TensorGroup]:
    return [stage.group for stage in plan.stages if stage.group is not None]


def pinned_groups(
    candidates: Sequence[Candidate], pins: Sequence[Pin], facts: GroupFacts
) -> tuple[list[Candidate], list[Pin]]:
    """Joins the peers that a pin names as a group, and returns the candidates and the pins of the groups' leaders.

    Raises PlacementError or InputError if the peers cannot be a group.
    """
    grouped = list(candidates)
    for pin in pins:
        if pin.group:
            wish = GroupWish(members=(pin.group,), backend=pin.group_backend)
            grouped = joined_as_named(grouped, wish, facts, pin.engine)
    return grouped, [replace(pin, peer_id=pin.group[0]) if pin.group else pin for pin in pins]


def as_pipeline(wish: GroupWish, plan: Plan, min_peers: int) -> tuple[GroupWish, int]:
    """Returns the wish, and the fewest peers, that place the members of a plan as single stages instead of groups."""
    return GroupWish(size=1, backend=wish.backend), max(min_peers, len(plan.member_ids))


REDUCES_PER_LAYER = 2
"""One all-reduce after attention, one after the feed-forward part."""

WORTH = 1.1
"""A group must decode this many times faster to be chosen: if one rank fails, the whole group stops."""

PREFILL_LOSS = 1.5
"""How many times slower long prompts may become in exchange."""


class GroupTimes(msgspec.Struct, frozen=True):
    """The measured times, and the sizes that they belong to.

    `ranks` machines hold `num_layers` layers together. all_reduce_s: of a few bytes; reduce_bytes_per_s: of many.
    layer_s, chunk_layer_s: one layer on one of the machines alone, for one token and for a chunk of chunk_tokens.
    token_bytes: of the activations of one token. hop_s: of one token from a machine to the next as stages. Raises
    ValueError unless every value is positive and there are at least two ranks.
    """

    ranks: int
    num_layers: int
    all_reduce_s: float
    reduce_bytes_per_s: float
    layer_s: float
    chunk_layer_s: float
    chunk_tokens: int
    token_bytes: int
    hop_s: float

    def __post_init__(self) -> None:
        least = min(
            self.num_layers, self.all_reduce_s, self.reduce_bytes_per_s, self.layer_s, self.chunk_layer_s,
            self.chunk_tokens, self.token_bytes, self.hop_s,
        )  # fmt: skip
        if self.ranks < 2 or not least > 0:
            raise ValueError(f"times of a tensor group must be positive, with at least 2 ranks: {self}")

    def reduce_s(self, tokens: int) -> float:
        """Seconds of an all-reduce of the activations of `tokens` tokens."""
        return self.all_reduce_s + tokens * self.token_bytes / self.reduce_bytes_per_s


class GroupVerdict(msgspec.Struct, frozen=True):
    """The decision. group: better as a tensor group. decode_gain, prefill_gain: how many times faster than as stages of
    a pipeline, for one stream and for one long prompt. reason: a sentence with the numbers."""

    group: bool
    decode_gain: float
    prefill_gain: float
    reason: str


def group_verdict(times: GroupTimes) -> GroupVerdict:
    """Decides between a group and a pipeline. A group divides every layer and pays two all-reduces for each. In a
    pipeline one token passes every layer of every machine in sequence, whereas the chunks of a long prompt follow each
    other and keep all machines busy."""
    layers, ranks = times.num_layers, times.ranks
    group_s = layers * (times.layer_s / ranks + REDUCES_PER_LAYER * times.reduce_s(1))
    ring_s = layers * times.layer_s + ranks * times.hop_s
    group_chunk_s = layers * (times.chunk_layer_s / ranks + REDUCES_PER_LAYER * times.reduce_s(times.chunk_tokens))
    ring_chunk_s = layers * times.chunk_layer_s / ranks
    decode_gain, prefill_gain = ring_s / group_s, ring_chunk_s / group_chunk_s
    reduces_s = layers * REDUCES_PER_LAYER * times.reduce_s(1)
    numbers = (
        f"a token takes {group_s * 1e3:.3g} ms as a group of {ranks}, {reduces_s / group_s:.0%} of it all-reduces "
        f"of {times.all_reduce_s * 1e6:.0f} us, and {ring_s * 1e3:.3g} ms as stages; a chunk of "
        f"{times.chunk_tokens} tokens {group_chunk_s * 1e3:.3g} and {ring_chunk_s * 1e3:.3g} ms"
    )
    group = decode_gain >= WORTH and prefill_gain * PREFILL_LOSS >= 1.0
    return GroupVerdict(group, decode_gain, prefill_gain, f"better as {'a group' if group else 'stages'}: {numbers}")

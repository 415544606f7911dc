"""Are several machines faster as one tensor group, or as stages of a pipeline? Arithmetic over what was measured."""

from __future__ import annotations

from dataclasses import dataclass

REDUCES_PER_LAYER = 2
"""One behind attention, one behind the feed-forward part."""

WORTH = 1.1
"""A group must decode this much faster: it breaks as a whole, and a pipeline does not."""

PREFILL_LOSS = 1.5
"""How much slower long prompts may become for it."""


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """What was measured, and of what.

    ranks machines hold num_layers layers together. all_reduce_s: of a few bytes; reduce_bytes_per_s: of many.
    layer_s, chunk_layer_s: one layer on one of the machines alone, for one token and for a chunk of chunk_tokens.
    token_bytes: of the activations of one token. hop_s: of one token from a machine to the next as stages.
    Raises ValueError unless all of it is positive, and there are two ranks at least.
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
            raise ValueError(f"not the times of a tensor group: {self}")

    def reduce_s(self, tokens: int) -> float:
        """An all-reduce of the activations of so many tokens."""
        return self.all_reduce_s + tokens * self.token_bytes / self.reduce_bytes_per_s


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """group: better as a tensor group. decode_gain, prefill_gain: how many times faster than as stages of a pipeline,
    for one stream and for one long prompt. reason: a sentence with the numbers."""

    group: bool
    decode_gain: float
    prefill_gain: float
    reason: str


def group_verdict(times: GroupTimes) -> GroupVerdict:
    """A group shares out every layer and pays two all-reduces for each. In a pipeline one token goes through every
    layer of every machine in turn, whereas the chunks of a long prompt follow each other and keep all machines busy."""
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

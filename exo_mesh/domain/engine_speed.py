"""The measured speed of an engine with one model on one machine, and what placement and previews conclude from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from exo_mesh.domain.fields import Cut, Flat, Only, Printable

PROMPT_TOKENS, ANSWER_TOKENS = 128, 64
"""The request by which engines are compared. Its prompt is also the prompt of a predicted time to the first token."""

CLEARLY_FASTER = 0.85
"""An engine replaces a preferred one if it needs at most this share of the other's time: less is within the noise of a
short measurement, and the choice must not change back and forth."""

FRAME_S = 0.0003
"""Seconds per step outside the engine: scheduling, sampling and delivery of one token."""

MAX_S = 3600.0
"""Largest figure that is believed."""


class ForwardCost(msgspec.Struct, frozen=True):
    """Seconds of one forward pass of a stage: for the pass itself, for each layer, and for the head of the model."""

    fixed_s: float
    layer_s: float
    head_s: float

    def of(self, num_layers: int, *, is_last: bool) -> float:
        """Seconds of a stage with this many layers. is_last: the stage has the head."""
        return self.fixed_s + num_layers * self.layer_s + (self.head_s if is_last else 0.0)

    @property
    def is_valid(self) -> bool:
        """Whether all figures are plausible, and the layers take time."""
        parts = (self.fixed_s, self.layer_s, self.head_s)
        return all(math.isfinite(part) and 0.0 <= part <= MAX_S for part in parts) and self.layer_s > 0


class EngineSpeed(msgspec.Struct, frozen=True):
    """The speed of an engine with a model. one, eight: a decode step with that many sequences. chunk: a prompt of
    chunk_tokens tokens."""

    one: ForwardCost
    eight: ForwardCost
    chunk: ForwardCost
    chunk_tokens: int

    @property
    def is_valid(self) -> bool:
        """Whether all figures are plausible."""
        return all(cost.is_valid for cost in (self.one, self.eight, self.chunk)) and 0 < self.chunk_tokens <= 2**20

    def prompt_s(self, num_layers: int, *, is_last: bool) -> float:
        """Seconds for a prompt of PROMPT_TOKENS tokens in a stage."""
        return self.chunk.of(num_layers, is_last=is_last) * PROMPT_TOKENS / self.chunk_tokens

    def request_s(self, num_layers: int) -> float:
        """Seconds for a prompt of PROMPT_TOKENS tokens and an answer of ANSWER_TOKENS tokens, with the whole model in
        one stage."""
        return self.prompt_s(num_layers, is_last=True) + ANSWER_TOKENS * self.one.of(num_layers, is_last=True)

    def s_per_gb(self, num_layers: int, step_bytes: int, policy: str) -> float:
        """Seconds of a decode step per 1e9 bytes of weights: of eight sequences for the placement policy throughput,
        else of one. step_bytes: what a step of the whole model reads, as in the files."""
        cost = self.eight if policy == "throughput" else self.one
        return cost.of(num_layers, is_last=True) / (max(1, step_bytes) / 1e9)


DIGEST_CHARS = 32

MAX_MODELS, MAX_ENGINES = 32, 8
"""Most models of one peer with speeds, and most engines of one model; the rest is cut off."""


def _is_valid(named: tuple[str, EngineSpeed]) -> bool:
    return named[1].is_valid


def _has_speeds(of_model: tuple[str, tuple[object, ...]]) -> bool:
    return bool(of_model[1])


_NamedSpeed = tuple[Annotated[str, Printable(64)], Annotated[EngineSpeed, Flat()]]
_NamedSpeeds = Annotated[tuple[_NamedSpeed, ...], Cut(MAX_ENGINES), Only(_is_valid)]
ModelSpeeds = Annotated[
    tuple[tuple[Annotated[str, Printable(DIGEST_CHARS)], _NamedSpeeds], ...], Cut(MAX_MODELS), Only(_has_speeds)
]
"""By model digest (its first DIGEST_CHARS characters): by engine, its measured speed. Impossible figures of a peer are
left out: placement computes with them."""


def speed_of(speeds: ModelSpeeds, digest: str, engine: str) -> EngineSpeed | None:
    """The speed of an engine with the model of this digest; None if it was not measured."""
    for key, engines in speeds:
        if key == digest[:DIGEST_CHARS]:
            return next((speed for name, speed in engines if name == engine), None)
    return None


def fastest_first(engines: Sequence[str], took_s: Mapping[str, float | None]) -> tuple[str, ...]:
    """Orders engines by measured time, where an engine only comes before a preferred one if it is CLEARLY_FASTER.

    engines: in the order of preference. took_s: seconds of the same work; None for an engine whose measurement failed.
    Such engines come last. While an engine has not been measured, the order stays as it is.
    """
    if any(engine not in took_s for engine in engines):
        return tuple(engines)
    took = {engine: seconds for engine, seconds in took_s.items() if seconds is not None}
    ordered: list[str] = []
    left = [engine for engine in engines if engine in took]
    while left:
        fastest = min(left, key=took.__getitem__)
        chosen = fastest if took[fastest] <= CLEARLY_FASTER * took[left[0]] else left[0]
        ordered.append(chosen)
        left.remove(chosen)
    return (*ordered, *(engine for engine in engines if engine not in took))


class Prediction(msgspec.Struct, frozen=True):
    """What one client can expect of a ring without other work. tokens_per_s: after the first token. ttft_s: for a
    prompt of PROMPT_TOKENS tokens."""

    tokens_per_s: float
    ttft_s: float


def predict(stages: Sequence[tuple[EngineSpeed, int]], hops_s: float) -> Prediction:
    """Predicts a ring from the speed of the engine and the number of layers of each stage, in ring order, and the time
    of the hops of a lap.

    The last token of a prompt is a step of its own, right behind the rest: it adds the last stage's step only."""
    last = len(stages) - 1
    steps = [speed.one.of(layers, is_last=index == last) for index, (speed, layers) in enumerate(stages)]
    prompts = [speed.prompt_s(layers, is_last=index == last) for index, (speed, layers) in enumerate(stages)]
    around_s = FRAME_S * len(stages) + hops_s
    return Prediction(1 / (sum(steps) + around_s), sum(prompts) + steps[last] + around_s)

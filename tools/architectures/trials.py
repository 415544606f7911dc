"""What is computed with each model: prompts longer than its windows, in two chunks, then decode steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations

import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import SequenceCopier, StageEngine
from tools import stages as frames
from tools.stages import CONTEXT, insert, remove

DECODE_STEPS = 6
CHUNKS = ((23, 18), (17, 12), (9, 2))
"""Prefill chunks of each prompt. The first crosses windows of 16 twice; the others are shorter."""

MARGIN = 1e-4
"""Largest difference of rows that attend together in MLX, relative to the rms of the logits, in float32."""

MAX_THREE_WAY = 5
"""Three-stage splits of one model: all of them up to this number, beyond that evenly spaced ones."""

Split = tuple[int, ...]
Schedule = list[tuple[int, int]]
Forward = Callable[[Sequence[Row]], np.ndarray]
"""Computes one frame; returns logits `[sum(num_logits), vocab]`."""


def _schedule(chunks: tuple[int, int]) -> Schedule:
    prompt = sum(chunks)
    return [(0, chunks[0]), (chunks[0], chunks[1]), *((prompt + step, 1) for step in range(DECODE_STEPS))]


SCHEDULES = tuple(map(_schedule, CHUNKS))
"""(pos0, n) of the forwards of each prompt."""

TOKENS = np.random.default_rng(11).integers(3, 96, (len(CHUNKS), sum(CHUNKS[0]) + DECODE_STEPS)).astype(np.int32)
"""Token ids of each prompt and of what follows it."""


def prompt_of(sequence: int) -> int:
    """Returns the index of the prompt of a sequence: sequences 1, 2, 3 have the first three, 4 the first again."""
    return (sequence - 1) % len(CHUNKS)


def _alone(stages: Sequence[StageEngine], forward: Forward) -> Iterator[np.ndarray]:
    insert(stages, [1])
    for pos0, n in SCHEDULES[0]:
        yield forward([Row(1, pos0, n, n)])
    remove(stages, [1])


def _together(stages: Sequence[StageEngine], forward: Forward) -> Iterator[np.ndarray]:
    """Sequences of different lengths share every frame."""
    insert(stages, [1, 2, 3])
    for steps in zip(*SCHEDULES, strict=True):
        yield forward([Row(sequence, pos0, n, 1) for sequence, (pos0, n) in enumerate(steps, 1)])
    remove(stages, [1, 2, 3])


def _restored(stages: Sequence[StageEngine], forward: Forward, first: int = 1) -> Iterator[np.ndarray]:
    """A sequence goes on in another one, into which its KV was restored on every stage."""
    schedule, second = SCHEDULES[prompt_of(first)], first + len(CHUNKS)
    half = len(schedule) // 2
    insert(stages, [first])
    for pos0, n in schedule[:half]:
        yield forward([Row(first, pos0, n, 1)])
    for stage in stages:
        stage.restore(second, CONTEXT, stage.save(first))
    for pos0, n in schedule[half:]:
        yield forward([Row(second, pos0, n, n)])
    remove(stages, [first, second])


def _cut_back(stages: Sequence[StageEngine], forward: Forward) -> Iterator[np.ndarray]:
    insert(stages, [1])
    for pos0, n in SCHEDULES[0]:
        yield forward([Row(1, pos0, n, 1)])
    yield forward([Row(1, 18, 3, 3)])
    yield forward([Row(1, 21, 1, 1)])
    remove(stages, [1])


def _copied(stages: Sequence[StageEngine], forward: Forward) -> Iterator[np.ndarray]:
    """A sequence, shorter than windows, goes on in a copy of it."""
    insert(stages, [3])
    for pos0, n in SCHEDULES[2][:2]:
        yield forward([Row(3, pos0, n, 1)])
    for stage in stages:
        assert isinstance(stage, SequenceCopier)
        stage.copy(3, 6, sum(CHUNKS[2]), CONTEXT)
    for pos0, n in SCHEDULES[2][2:]:
        yield forward([Row(6, pos0, n, n)])
    remove(stages, [3, 6])


_PARTS: dict[str, Callable[[Sequence[StageEngine], Forward], Iterator[np.ndarray]]] = {
    "alone": _alone,
    "together": _together,
    "restored": _restored,
    "restored short": partial(_restored, first=3),
    "cut back": _cut_back,
    "copied": _copied,
}


def computed(stages: Sequence[StageEngine], part: str = "alone") -> np.ndarray:
    """Returns the logits of all frames of a part, by a ring."""

    def forward(rows: Sequence[Row]) -> np.ndarray:
        ids = np.concatenate([TOKENS[prompt_of(row.sequence), row.pos0 : row.pos0 + row.n] for row in rows])
        return frames.forward(stages, rows, ids)

    return np.concatenate(list(_PARTS[part](stages, forward)))


def expected(alone: Sequence[np.ndarray], parts: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the logits of each part, from those of each prompt by itself: `[positions, vocab]`."""

    def forward(rows: Sequence[Row]) -> np.ndarray:
        stops = [row.pos0 + row.n for row in rows]
        return np.concatenate(
            [
                alone[prompt_of(row.sequence)][stop - row.num_logits : stop]
                for row, stop in zip(rows, stops, strict=True)
            ]
        )

    return {part: np.concatenate(list(_PARTS[part]((), forward))) for part in parts}


def differences(stages: Sequence[StageEngine], want: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the largest difference of any logit of each part; 0.0 if every bit is equal."""
    return {part: difference(computed(stages, part), logits) for part, logits in want.items()}


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Returns 0.0 if all bits are equal (NaN and infinities too); infinity if shapes or finite positions differ."""
    if got.shape != expected.shape:
        return float("inf")
    if np.array_equal(got.view(np.uint32), expected.astype(np.float32).view(np.uint32)):
        return 0.0
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(got)):
        return float("inf")
    return max(float(np.abs(got[finite] - expected[finite]).max()), float(np.finfo(np.float32).tiny))


def require_information(want: Mapping[str, np.ndarray]) -> None:
    """Raises RuntimeError if the logits are equal or invalid, because that would hide every mistake."""
    last = want["together"]
    finite = last[:, np.isfinite(last).all(axis=0)]
    if np.isnan(last).any() or finite.size == 0 or not np.ptp(finite) > 0.1 or not np.ptp(finite, axis=0).max() > 0:
        raise RuntimeError("the tiny model's logits say nothing: not a number, or all the same")


def splits_of(cuts: Sequence[int], *, few: bool, most: int = MAX_THREE_WAY) -> list[Split]:
    """Lists the splits: unsplit, every cut in two, and at most so many in three; or one of each."""
    if few:
        return [
            (),
            *sorted({tuple(cuts[len(cuts) // 2 :][:1]), tuple(cuts[:: max(1, len(cuts) - 1)][:2])} - {()}, key=len),
        ]
    triples = list(combinations(cuts, 2))
    return [(), *((cut,) for cut in cuts), *triples[:: max(1, -(-len(triples) // most))]]

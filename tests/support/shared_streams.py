"""Sequences with a common beginning on stages of any engine, and what each of them computes alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import EngineProvider, StageEngine
from tools.stages import Stages, forward, insert, remove

PROMPT = tuple(3 + (7 * place) % 50 for place in range(1000))
MOST = 3000
ALONE = 9999

Tokens = tuple[int, ...]
Loaded = list[StageEngine]


class Streams:
    """Rings of one model, which must compute the same bits. lonely: one that shares nothing; by default the first.

    tolerance: the largest difference from a sequence alone, from its logits. room: positions of its own that each copy
    gets at most when it computes; growth: of the memory of what is shared.
    """

    def __init__(
        self,
        rings: Sequence[Loaded],
        lonely: Loaded | None = None,
        *,
        tolerance: Callable[[np.ndarray], float] = lambda wanted: 1e-4,
        room: int = 0,
        growth: float = 1.1,
    ) -> None:
        self.rings, self.lonely, self.tolerance = rings, lonely or rings[0], tolerance
        self.room, self.growth = room, growth

    @property
    def stages(self) -> list[Any]:
        return [stage for ring in self.rings for stage in ring]

    @property
    def memory_bytes(self) -> int:
        return sum(stage.memory_bytes() for stage in self.stages)

    def insert(self, sequence: int) -> None:
        insert(self.stages, [sequence], MOST)

    def copy(self, source: int, sequence: int, upto: int) -> None:
        for stage in self.stages:
            stage.copy(source, sequence, upto, MOST)

    def move(self, source: int, sequence: int, upto: int) -> None:
        for stage in self.stages:
            stage.move(source, sequence, upto, MOST)

    def remove(self, *sequences: int) -> None:
        remove(self.stages, sequences)

    def clear(self) -> None:
        for stage in {id(one): one for one in [*self.stages, *self.lonely]}.values():
            for sequence in stage.sequences():
                stage.remove(sequence)

    def compute(self, *rows: tuple[int, int, Tokens]) -> np.ndarray:
        """Returns the logits of the last position of each row (sequence, pos0, tokens)."""
        first, *others = [_computed(ring, rows) for ring in self.rings]
        for other in others:
            np.testing.assert_array_equal(other, first)
        return first

    def begin(self, length: int = len(PROMPT), sequence: int = 1) -> None:
        self.insert(sequence)
        self.compute((sequence, 0, PROMPT[:length]))

    def check_alone(self, got: np.ndarray, context: Tokens, tokens: Tokens, why: str = "") -> None:
        """Compares logits with those of a sequence that computes the context and then the tokens by itself."""
        insert(self.lonely, [ALONE], MOST)
        _computed(self.lonely, [(ALONE, 0, context)])
        wanted = _computed(self.lonely, [(ALONE, len(context), tokens)])[0]
        remove(self.lonely, [ALONE])
        np.testing.assert_allclose(got, wanted, rtol=0, atol=self.tolerance(wanted), err_msg=why)


def loaded(provider: EngineProvider, directory: Path, layers: int, *cuts: int, **options: str) -> Loaded:
    return Stages(provider, directory, layers, **options).ring(cuts)


def _computed(ring: Loaded, rows: Sequence[tuple[int, int, Tokens]]) -> np.ndarray:
    ids = [token for _, _, tokens in rows for token in tokens]
    return forward(ring, [Row(sequence, pos0, len(tokens), 1) for sequence, pos0, tokens in rows], ids)


def run_schedule(streams: Streams, seed: int, steps: int) -> None:
    """Makes random copies, moves, rows, cuts and ends; each row is compared with the sequence alone."""
    rng = random.Random(seed)
    held: dict[int, Tokens] = {}

    def draw(count: int) -> Tokens:
        return tuple(rng.randrange(3, 60) for _ in range(count))

    for new in range(1, steps):
        kind = rng.random()
        if not held or kind < 0.13:
            held[new] = draw(rng.choice([5, 30, 90]))
            streams.insert(new)
            streams.compute((new, 0, held[new]))
        elif kind < 0.5:
            source = rng.choice(list(held))
            upto = rng.randint(1, len(held[source]))
            held[new] = held[source][:upto]
            (streams.copy if kind < 0.43 else streams.move)(source, new, upto)
            if kind >= 0.43:
                del held[source]
        elif kind < 0.58 and len(held) > 2:
            gone = rng.choice(list(held))
            del held[gone]
            streams.remove(gone)
        else:
            chosen = rng.sample(list(held), rng.choice([1, rng.randint(1, len(held))]))
            for _ in range(rng.choice([1, 2, 3]) if len(chosen) == 1 else 1):
                _compute_and_check(streams, rng, held, chosen, draw(rng.choice([1, 1, 1, 3, 20, 60])), f"{seed}, {new}")


def _compute_and_check(
    streams: Streams, rng: random.Random, held: dict[int, Tokens], chosen: Sequence[int], tokens: Tokens, why: str
) -> None:
    rows: list[tuple[int, int, Tokens]] = []
    for sequence in chosen:
        back = rng.randrange(min(12, len(held[sequence]))) if rng.random() < 0.2 else 0
        rows.append((sequence, len(held[sequence]) - back, tuple((token + sequence) % 57 + 3 for token in tokens)))
    got = streams.compute(*rows)
    for place, (sequence, pos0, own) in enumerate(rows):
        held[sequence] = held[sequence][:pos0] + own
        streams.check_alone(got[place], held[sequence][:pos0], own, f"seed and step {why}")


def decode_together(streams: Streams, held: Mapping[int, Tokens]) -> None:
    """Sequences decode one, two and three tokens in common frames, in another order each time, as each does alone."""
    context = dict(held)
    for tokens in ((5,), (6, 7), (8,), (9, 10, 11)):
        order = sorted(context, key=lambda sequence: (sequence * tokens[0]) % 7)
        got = streams.compute(*((sequence, len(context[sequence]), tokens) for sequence in order))
        for place, sequence in enumerate(order):
            streams.check_alone(got[place], context[sequence], tokens, f"{sequence} {tokens}")
            context[sequence] += tokens

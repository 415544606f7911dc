"""Decodes with drafts, refusals and chains of rows, and compares with decoding token by token."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh.engine.conformance.schedules import DraftedSequence, prefill, run_drafts, without_drafts
from exo_mesh.engine.contract import StageEngine
from tools.architectures.outcome import Outcome
from tools.architectures.sizes import VOCAB
from tools.stages import forward, insert, remove

PROMPTS = {1: 2, 2: 14, 3: 41}
"""{sequence: prompt tokens}: shorter than windows of 16, nearly as long, and much longer."""

DECODED = 24
SEEDS = 2

LARGEST = 1e-3
"""Largest difference from decoding without drafts, relative to the rms of the logits, in float32: some kernels compute
several tokens in another way than one."""


def check_drafts(outcome: Outcome, ring: Sequence[StageEngine], largest: float = LARGEST) -> None:
    """Notes among the differences of an outcome what is left of refused drafts, if the ring can cut back at all."""
    if not min(engine.capabilities.rollback for engine in ring):
        return
    for seed in range(SEEDS):
        worst = largest_difference(ring, Random(seed))
        if not worst <= largest:
            outcome.different[f"{len(ring)} stages, drafts {seed}"] = worst


def largest_difference(ring: Sequence[StageEngine], rng: Random) -> float:
    """Returns the largest difference of any logit from a sequence that never drafted, relative to their rms."""
    given = {
        sequence: ([rng.randrange(3, VOCAB) for _ in range(prompt + DECODED)], prompt)
        for sequence, prompt in PROMPTS.items()
    }

    def compute(rows: Sequence[Row], ids: Sequence[int]) -> np.ndarray:
        return forward(ring, rows, ids)

    insert(ring, given)
    want = without_drafts(given, compute)
    remove(ring, given)
    scale = float(np.sqrt(np.mean(np.square(np.concatenate(list(want.values())), dtype=np.float64)))) or 1.0
    found = [0.0]

    def note(got: np.ndarray, wanted: np.ndarray) -> None:
        finite = np.isfinite(wanted)
        found.append(float(np.max(np.abs(got[finite] - wanted[finite]), initial=0.0)) / scale)

    insert(ring, given)
    prefill(given, compute)
    sequences = [DraftedSequence(number, ids, prompt, want[number]) for number, (ids, prompt) in given.items()]
    run_drafts(sequences, compute, note, [engine.capabilities for engine in ring], rng=rng, vocab_size=VOCAB)
    remove(ring, given)
    return float(np.max(found))

"""Checks that a model which is cut into stages gives the same logits as in one piece."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from exo_mesh.domain.frame import Row
from exo_mesh.engine.conformance.fixtures import Alike
from exo_mesh.engine.conformance.stages import CutModel, Stages

__all__ = [
    "of_the_whole",
    "test_every_cut_into_two_gives_the_whole_models_logits",
    "test_three_stages_give_the_whole_models_logits",
]

SCHEDULE = ((0, 17), (17, 12), *((29 + step, 1) for step in range(6)))
"""Prefill in two chunks, then six decode steps, as (pos0, n)."""


def run_schedule(stages: Stages) -> np.ndarray:
    """Compute SCHEDULE; returns float32 `[35, vocab]`, the logits of every position."""
    stages.insert(1)
    return np.concatenate([stages.logits([Row(1, pos0, n, n)]) for pos0, n in SCHEDULE])


@pytest.fixture(scope="module")
def of_the_whole(model: CutModel) -> np.ndarray:
    with model.cut(()) as whole:
        logits = run_schedule(whole)
    assert len(set(logits.argmax(1).tolist())) > 5, (
        "nearly all tokens are the same, so the comparison would prove little"
    )
    return logits


def compare(model: CutModel, cuts: Sequence[int], want: np.ndarray, same_work: Alike) -> None:
    with model.cut(cuts) as stages:
        same_work(run_schedule(stages), want)


def test_every_cut_into_two_gives_the_whole_models_logits(
    model: CutModel, of_the_whole: np.ndarray, same_work: Alike
) -> None:
    if not model.cuts:
        pytest.skip("this model runs in one piece only")
    for cut in model.cuts:
        compare(model, (cut,), of_the_whole, same_work)


def test_three_stages_give_the_whole_models_logits(model: CutModel, of_the_whole: np.ndarray, same_work: Alike) -> None:
    if len(model.cuts) < 2:
        pytest.skip("this model has fewer than two places to cut")
    compare(model, (model.cuts[0], model.cuts[-1]), of_the_whole, same_work)

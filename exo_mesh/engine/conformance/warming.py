"""Checks that the passes before the first request change nothing that later requests see."""

from __future__ import annotations

import numpy as np
import pytest

from exo_mesh.engine.conformance.fixtures import Alike
from exo_mesh.engine.conformance.slices import run_schedule
from exo_mesh.engine.conformance.stages import CONTEXT, CutModel
from exo_mesh.engine.contract import Warmable

__all__ = ["test_a_warm_up_leaves_nothing_behind"]


def test_a_warm_up_leaves_nothing_behind(model: CutModel, of_the_whole: np.ndarray, same_work: Alike) -> None:
    with model.cut(model.middle) as stages:
        for engine in stages.engines:
            if not isinstance(engine, Warmable):
                pytest.skip("the engine has no warm-up")
            engine.warm_up(CONTEXT)
            engine.warm_up(1)
            assert not list(engine.sequences())
        same_work(run_schedule(stages), of_the_whole)

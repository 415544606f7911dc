"""Checks the tensors that a stage passes on: as it declares them, and in the agreed dtype."""

from __future__ import annotations

import pytest

from exo_mesh.domain.frame import HIDDEN, Row
from exo_mesh.engine.conformance.stages import CutModel, Stages, assert_close
from exo_mesh.engine.contract import EngineProvider, StageInput
from exo_mesh.errors import MeshError

__all__ = [
    "test_a_dtype_that_it_does_not_know_is_refused",
    "test_activations_go_in_every_dtype_that_it_declares",
    "test_an_engine_declares_what_kinds_of_kv_it_keeps",
    "test_stages_declare_what_they_take_and_give",
]

DTYPE_TOLERANCE = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}
"""How far the logits may move when hidden states are passed on in that dtype, relative to the rms of the logits."""


def test_stages_declare_what_they_take_and_give(stages: Stages, engine_provider: EngineProvider) -> None:
    blank = engine_provider.create().capabilities
    assert (blank.inputs, blank.outputs) == ((), ()), "a stage that is not loaded knows no shapes"
    assert stages.first.capabilities.inputs == stages.last.capabilities.outputs == ()
    for before, after in zip(stages.engines, stages.engines[1:], strict=False):
        assert before.capabilities.outputs
        assert before.capabilities.outputs[0].name == HIDDEN
        given = {(spec.name, spec.item_shape) for spec in before.capabilities.outputs}
        assert given == {(spec.name, spec.item_shape) for spec in after.capabilities.inputs}
    rows = (Row(1, 0, 3), Row(2, 0, 3))
    stages.insert(1, 2)
    tensors = stages.first.forward(StageInput(rows, stages.ids(rows), {})).tensors
    specs = stages.first.capabilities.outputs
    assert {(name, t.dtype, t.shape[1:]) for name, t in tensors.items()} == {
        (spec.name, spec.dtype, spec.item_shape) for spec in specs
    }


def test_an_engine_declares_what_kinds_of_kv_it_keeps(stages: Stages) -> None:
    for engine in stages.engines:
        kinds = engine.capabilities.kv
        assert len(set(kinds)) == len(kinds)


def test_activations_go_in_every_dtype_that_it_declares(model: CutModel, stages: Stages) -> None:
    if not model.middle:
        pytest.skip("this model runs in one piece only")
    stages.insert(1)
    want = stages.logits([Row(1, 0, 9, 9)])
    for dtype in stages.first.capabilities.dtypes:
        with model.cut(model.middle, activation_dtype=dtype) as agreed:
            agreed.insert(1)
            rows = (Row(1, 0, 9, 9),)
            given = agreed.first.forward(StageInput(rows, agreed.ids(rows), {})).tensors
            assert {tensor.dtype for name, tensor in given.items() if name == HIDDEN} == {dtype}
            assert_close(agreed.logits(rows), want, DTYPE_TOLERANCE.get(dtype, 0.0))


def test_a_dtype_that_it_does_not_know_is_refused(model: CutModel, subject: object) -> None:
    with pytest.raises(MeshError, match="float8_e3m4"):
        model.stage(0, (*model.cuts, model.num_layers)[0], activation_dtype="float8_e3m4")

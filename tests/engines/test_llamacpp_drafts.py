"""Windows and recurrent states of llama.cpp are cut back by refused drafts, also when their place changes meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("exo_mesh_llamacpp")

from exo_mesh_llamacpp import provider
from exo_mesh_llamacpp.stage import LlamaCppStage

from exo_mesh.domain.frame import Fault, Row
from exo_mesh.engine.contract import CUT_POSITIONS, StageInput

if not provider.availability().available:
    pytest.skip("llama.cpp is not installed", allow_module_level=True)

from tools.architectures import llamacpp_models
from tools.architectures.drafting import check_drafts
from tools.architectures.outcome import Outcome
from tools.architectures.sizes import VOCAB, WINDOW

DIVERSE = {"gemma3": False, "lfm2": True, "mamba2": True, "gpt-oss experts": False, "falcon-h1": True}
"""{architecture: whether it can be cut back only to where rows began}"""

QUICK = ("gemma3", "lfm2")

LARGEST = 5e-3
"""The library takes GELU from a table of float16, so one token and several differ."""

Send = Callable[[Row], tuple[Fault, ...]]


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in QUICK else pytest.mark.extended) for name in DIVERSE]
)
def test_refused_drafts_leave_no_trace(tmp_path: Path, architecture: str) -> None:
    outcome = Outcome(architecture, layers=llamacpp_models.write(tmp_path, architecture))
    stages = llamacpp_models.stages(tmp_path, outcome)
    cuts, _ = llamacpp_models.survey(tmp_path, architecture)
    ring = stages.ring(cuts[len(cuts) // 2 :][:1])
    assert {stage.capabilities.cuts_at_rows for stage in ring} == {DIVERSE[architecture]}
    assert {stage.capabilities.rollback for stage in ring} == {CUT_POSITIONS if DIVERSE[architecture] else WINDOW}
    check_drafts(outcome, ring, LARGEST)
    stages.close()
    assert outcome.different == {}


@pytest.fixture(params=["gemma3", "lfm2"])
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LlamaCppStage]:
    outcome = Outcome(request.param, layers=llamacpp_models.write(tmp_path, request.param))
    stages = llamacpp_models.stages(tmp_path, outcome)
    (stage,) = stages.ring(())
    assert isinstance(stage, LlamaCppStage)
    yield stage
    stages.close()


def compute(stage: LlamaCppStage, row: Row, ids: list[int]) -> np.ndarray:
    output = stage.forward(StageInput((row,), tuple(ids[row.pos0 : row.pos0 + row.n]), {}))
    assert not output.faults and output.logits is not None
    return output.logits


def test_a_sequence_with_unjudged_drafts_may_be_moved(stage: LlamaCppStage) -> None:
    """It outgrows its place, and others come, so that the context is made again with more slots."""
    ids = np.random.default_rng(3).integers(3, VOCAB, 600).tolist()
    wrong = [(token + 1) % VOCAB for token in ids]
    for sequence in (1, 2):
        stage.insert(sequence, 600)
        for pos0 in range(0, 500, 100):
            compute(stage, Row(sequence, pos0, 100, 1), ids)
    compute(stage, Row(1, 500, 4, 4), [*ids[:501], *wrong[501:]])
    for other in range(3, 20):  # more sequences than slots
        stage.insert(other, 64)
        compute(stage, Row(other, 0, 40, 1), wrong)
    compute(stage, Row(1, 504, 6, 6, drafted=True), wrong)
    compute(stage, Row(1, 510, 4, 4, drafted=True), wrong)  # more positions than the place has
    back = 500 if stage.capabilities.cuts_at_rows else 501
    got = compute(stage, Row(1, back, 503 - back, 1), ids)
    compute(stage, Row(2, 500, 2, 1), ids)
    want = compute(stage, Row(2, 502, 1, 1), ids)
    assert np.abs(got - want).max() <= LARGEST * float(np.sqrt(np.mean(np.square(want))))


def test_what_is_settled_cannot_be_cut_back_where_states_are_kept(stage: LlamaCppStage) -> None:
    if not stage.capabilities.cuts_at_rows:
        pytest.skip("it keeps no states")
    ids = [5] * 64
    stage.insert(1, 64)
    before = stage.memory_bytes()
    compute(stage, Row(1, 0, 40, 1), ids)
    held = stage.memory_bytes()
    compute(stage, Row(1, 40, 3, 3), ids)
    assert stage.memory_bytes() > held >= before
    compute(stage, Row(1, 43, 1, 1), ids)
    assert stage.memory_bytes() == held
    (fault,) = stage.forward(StageInput((Row(1, 40, 1, 1),), (5,), {})).faults
    assert fault.code == "bad_row" and "cannot go back from position 44 to 40" in fault.message
    compute(stage, Row(1, 44, 1, 1), ids)


def test_a_build_that_saves_no_parts_of_states_declares_no_rollback(tmp_path: Path) -> None:
    outcome = Outcome("lfm2", layers=llamacpp_models.write(tmp_path, "lfm2"))
    stages = llamacpp_models.stages(tmp_path, outcome)
    (stage,) = stages.ring(())
    assert isinstance(stage, LlamaCppStage)
    loaded = stage._loaded()
    library = loaded.model.library
    try:
        library.saves_parts = False
        again = LlamaCppStage(lambda request, progress: loaded)
        again.load(None, lambda done, total: None)  # type: ignore[arg-type]
        assert again.capabilities.rollback == 0
        stage.insert(1, 64)
        compute(stage, Row(1, 0, 5, 1), [5] * 20)
        compute(stage, Row(1, 5, 3, 3), [5] * 20)
        assert stage.forward(StageInput((Row(1, 5, 1, 1),), (5,), {})).faults
    finally:
        library.saves_parts = True
        stages.close()

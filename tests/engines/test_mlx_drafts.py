"""Windows, chunks and recurrent states of mlx-lm's models are cut back by refused drafts, and cost nothing without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

from exo_mesh_mlx import provider
from exo_mesh_mlx.engine import MlxStage

from exo_mesh.domain.frame import Fault, Row
from exo_mesh.engine.contract import CUT_POSITIONS, StageInput
from tools.architectures.drafting import check_drafts
from tools.architectures.mlx_configs import tiny_config
from tools.architectures.mlx_models import write_checkpoint
from tools.architectures.outcome import Outcome
from tools.architectures.sizes import LAYERS, WINDOW
from tools.stages import Stages

DIVERSE = {
    "gemma3_text": False,  # windows
    "gemma3n": False,  # later layers read the windows of earlier ones
    "llama4": False,  # chunks
    "mamba2": True,  # states
    "qwen3_next": True,  # states beside keys and values
    "baichuan_m1": True,  # states and windows in one layer
    "deepseek_v41": True,  # a cache that mlx-lm's model file defines
    "rwkv7": True,
    "recurrent_gemma": True,
    "longcat_flash_ngram": True,  # states of token ids
}
"""{architecture: whether it can be cut back only to where rows began}"""

QUICK = ("gemma3_text", "mamba2")

Send = Callable[[Row], tuple[Fault, ...]]


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in QUICK else pytest.mark.extended) for name in DIVERSE]
)
def test_refused_drafts_leave_no_trace(tmp_path: Path, architecture: str) -> None:
    write_checkpoint(tmp_path, tiny_config(architecture))
    stages, outcome = Stages(provider, tmp_path, LAYERS), Outcome(architecture)
    ring = stages.ring((1,))
    assert all(stage.capabilities.rollback == CUT_POSITIONS for stage in ring)
    assert {stage.capabilities.cuts_at_rows for stage in ring} == {DIVERSE[architecture]}
    check_drafts(outcome, ring)
    stages.close()
    assert outcome.different == {}


def test_a_model_whose_windows_depend_on_the_number_of_tokens_does_not_draft(tmp_path: Path) -> None:
    """In a row of several tokens, this model's code lets each see one position more than alone."""
    write_checkpoint(tmp_path, tiny_config("plamo3"))
    stages = Stages(provider, tmp_path, LAYERS)
    assert [stage.capabilities.rollback for stage in stages.ring((3,))] == [0, 0]
    stages.close()


@pytest.fixture(params=["gemma3_text", "mamba2"])
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MlxStage]:
    write_checkpoint(tmp_path, tiny_config(request.param))
    stages = Stages(provider, tmp_path, LAYERS)
    (stage,) = stages.ring(())
    assert isinstance(stage, MlxStage)
    stage.insert(1, 128)
    yield stage
    stages.close()


@pytest.fixture
def send(stage: MlxStage) -> Send:
    return lambda row: stage.forward(StageInput((row,), (5,) * row.n, {})).faults


def test_without_drafts_a_sequence_holds_no_more_than_mlx_lm_does(stage: MlxStage, send: Send) -> None:
    send(Row(1, 0, 40, 1))
    for pos0 in range(40, 44):
        assert not send(Row(1, pos0, 1, 1))
    assert held(stage) <= WINDOW
    assert not send(Row(1, 44, 4, 4))
    for pos0 in range(48, 60, 2):
        assert not send(Row(1, pos0, 2, 2, drafted=True))
    assert held(stage) > WINDOW or earlier(stage) == 7
    assert not send(Row(1, 58, 1, 1))
    assert not send(Row(1, 59, 1, 1))
    assert held(stage) <= WINDOW and earlier(stage) == 0


def test_what_is_settled_cannot_be_cut_back_and_the_sequence_is_as_it_was(stage: MlxStage, send: Send) -> None:
    send(Row(1, 0, 40, 1))
    assert not send(Row(1, 40, 3, 3))
    assert not send(Row(1, 43, 2, 2))
    (fault,) = send(Row(1, 40, 1, 1))
    assert fault.code == "bad_row" and "cannot be cut back from 45 to 40" in fault.message
    assert not send(Row(1, 43, 1, 1))


def test_a_chain_of_many_rows_keeps_as_many_positions_as_are_declared(stage: MlxStage, send: Send) -> None:
    send(Row(1, 0, 40, 1))
    assert not send(Row(1, 40, 1, 1))
    for pos0 in range(41, 41 + 2 * CUT_POSITIONS):
        assert not send(Row(1, pos0, 1, 1, drafted=True))
    assert held(stage) <= WINDOW + CUT_POSITIONS and earlier(stage) <= CUT_POSITIONS + 1
    assert send(Row(1, 42, 1, 1))
    assert not send(Row(1, 41 + CUT_POSITIONS, 1, 1))


def held(stage: MlxStage) -> int:
    """The most positions that a window holds; 0 without windows."""
    entries = stage._sequences[1].cache.own_entries()
    return max((entry.keys.shape[2] for entry in entries if hasattr(entry, "max_size")), default=0)


def earlier(stage: MlxStage) -> int:
    """The number of earlier states that are kept."""
    return len(stage._sequences[1].cache.pasts._kept)

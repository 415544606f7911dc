"""Windows and recurrent states of transformers' models are cut back by refused drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from exo_mesh_torch import provider
from exo_mesh_torch.engine import TorchStage

from exo_mesh.domain.frame import Fault, Row
from exo_mesh.engine.contract import CUT_POSITIONS, StageInput
from tools.architectures.drafting import check_drafts
from tools.architectures.outcome import Outcome
from tools.architectures.torch_families import NUM_LAYERS
from tools.architectures.torch_models import write_random_model
from tools.stages import Stages

DIVERSE = {
    "gpt_oss": False,  # windows
    "llama4_text": False,  # chunks
    "lfm2": True,  # states of convolutions
    "qwen3_next": True,  # states beside keys and values
    "mamba2": True,  # states alone
    "falcon_h1": True,  # both in one layer
}
"""{family: whether it can be cut back only to where rows began}"""

QUICK = ("gpt_oss", "lfm2")

Send = Callable[[Row], tuple[Fault, ...]]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing by threads, and wait for them on a busy machine."""
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.extended) for name in DIVERSE]
)
def test_refused_drafts_leave_no_trace(tmp_path: Path, family: str) -> None:
    write_random_model(tmp_path, family)
    stages, outcome = Stages(provider, tmp_path, NUM_LAYERS, threads="1"), Outcome(family)
    ring = stages.ring((3,))
    assert all(stage.capabilities.rollback == CUT_POSITIONS for stage in ring)
    assert {stage.capabilities.cuts_at_rows for stage in ring} == {DIVERSE[family]}
    check_drafts(outcome, ring)
    stages.close()
    assert outcome.different == {}


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])
def test_a_model_whose_longer_rows_begin_with_empty_states_does_not_draft(tmp_path: Path, family: str) -> None:
    """In transformers' own code, only a single token goes on from the state before it."""
    write_random_model(tmp_path, family)
    stages = Stages(provider, tmp_path, NUM_LAYERS, threads="1")
    assert [stage.capabilities.rollback for stage in stages.ring((3,))] == [0, 0]
    stages.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[TorchStage]:
    write_random_model(tmp_path, "lfm2")
    stages = Stages(provider, tmp_path, NUM_LAYERS, threads="1")
    (stage,) = stages.ring(())
    assert isinstance(stage, TorchStage)
    stage.insert(1, 128)
    yield stage
    stages.close()


@pytest.fixture
def send(stage: TorchStage) -> Send:
    return lambda row: stage.forward(StageInput((row,), (5,) * row.n, {})).faults


def test_states_are_kept_only_while_drafts_are_unjudged(stage: TorchStage, send: Send) -> None:
    send(Row(1, 0, 40, 1))
    assert not send(Row(1, 40, 1, 1))
    before = stage.memory_bytes()
    assert not send(Row(1, 41, 3, 3))
    assert not send(Row(1, 44, 2, 2, drafted=True))
    assert stage.memory_bytes() > before
    assert not send(Row(1, 44, 1, 1))
    assert stage.memory_bytes() == before
    (fault,) = send(Row(1, 41, 1, 1))
    assert fault.code == "bad_row" and "cannot be cut back from 45 to 41" in fault.message
    assert not send(Row(1, 45, 1, 1))


def test_a_removed_sequence_leaves_no_states(stage: TorchStage, send: Send) -> None:
    before = stage.memory_bytes()
    send(Row(1, 0, 5, 1))
    assert not send(Row(1, 5, 3, 3))
    stage.remove(1)
    assert stage.memory_bytes() == before


def test_a_long_chain_keeps_as_many_states_as_positions_are_declared(stage: TorchStage, send: Send) -> None:
    send(Row(1, 0, 40, 1))
    for pos0 in range(40, 40 + 2 * CUT_POSITIONS):
        assert not send(Row(1, pos0, 1, 1, drafted=True))
    assert stage._batches is not None and len(stage._batches._pasts[1]) <= CUT_POSITIONS + 1
    assert send(Row(1, 41, 1, 1))
    assert not send(Row(1, 40 + CUT_POSITIONS, 1, 1))


@pytest.mark.parametrize("family", ["mamba", pytest.param("jamba", marks=pytest.mark.extended)])
def test_a_prompt_in_chunks_is_what_it_is_in_one_where_longer_rows_begin_with_empty_states(
    tmp_path: Path, family: str
) -> None:
    write_random_model(tmp_path, family)
    ids = [5, 9, 2, 7, 7, 3, 8, 1, 4, 6]
    answers = []
    for sizes in ((10,), (4, 5, 1), (4, 6)):
        stages = Stages(provider, tmp_path, NUM_LAYERS, threads="1")
        ring = stages.ring((3,))
        for stage in ring:
            stage.insert(1, 16)
        at = 0
        for n in sizes:
            wanted = n if at + n == len(ids) else 0
            hidden: dict = {}
            for stage in ring:
                output = stage.forward(StageInput((Row(1, at, n, wanted),), tuple(ids[at : at + n]), hidden))
                assert not output.faults
                hidden = dict(output.tensors)
            at += n
        assert output.logits is not None and len(output.logits) == wanted
        answers.append(output.logits[-1])
        stages.close()
    for answer in answers[1:]:
        assert abs(answer - answers[0]).max() < 1e-3 * abs(answers[0]).max()

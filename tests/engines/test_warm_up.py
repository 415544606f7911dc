"""Before its first request, an engine computes what that request would wait for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from exo_mesh.domain.frame import Fault, Row
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import (
    ANY_POSITION,
    Capabilities,
    LoadProgress,
    LoadRequest,
    StageInput,
    StageOutput,
    TensorSpec,
)
from exo_mesh.engine.registry import load_registry
from exo_mesh.engine.warm_up import CPU_TOKENS, PROMPT_TOKENS, run_first_passes
from exo_mesh.errors import EngineError
from exo_mesh.rings.hosting.reservations import Lease
from exo_mesh.rings.hosting.stage_state import start_message
from exo_mesh.rings.runner import worker as worker_module
from exo_mesh.rings.runner.process import _setup
from exo_mesh.rings.runner.ring_rest import IDLE_AFTER_S
from exo_mesh.rings.runner.stage_setup import StageSetup
from exo_mesh.rings.runner.worker import Worker
from exo_mesh.settings.config import Settings
from tests.support.checkpoints import TinyModel, write_checkpoint

PLAN = Plan(
    "i",
    Ballot(1, "test"),
    "m",
    "digest",
    tuple(StagePlan(f"p{index}", "seen", Shard("m", index, index + 1, 2), 0) for index in range(2)),
    512,
    PlanInputs((), "memory", 1),
)


class SeenStage:
    """A middle stage that records its frames, and refuses the row that begins at a position."""

    capabilities = Capabilities(
        ragged=True,
        rollback=ANY_POSITION,
        dtypes=("float32",),
        inputs=(TensorSpec("hidden", "bfloat16", (3,)), TensorSpec("extra", "int64", (2, 2))),
    )

    def __init__(self, refused: int = -1) -> None:
        self.refused = refused
        self.rows: list[Row] = []
        self.tensors: list[Mapping[str, Any]] = []
        self.held: dict[int, int] = {}
        self.warmed: list[int] = []

    def load(self, request: LoadRequest, progress: LoadProgress) -> None:
        progress(1, 1)

    def warm_up(self, context_limit: int) -> None:
        self.warmed.append(context_limit)
        run_first_passes(self, context_limit, on_gpu=True)

    def insert(self, sequence: int, max_tokens: int) -> None:
        self.held[sequence] = max_tokens

    def forward(self, stage_input: StageInput) -> StageOutput:
        self.rows += stage_input.rows
        self.tensors.append(stage_input.tensors)
        faults = [Fault(row.sequence, 0, "bad_row", "no") for row in stage_input.rows if row.pos0 == self.refused]
        return StageOutput(faults=tuple(faults))

    def remove(self, sequence: int) -> None:
        self.held.pop(sequence, None)

    def sequences(self) -> list[int]:
        return list(self.held)

    def memory_bytes(self) -> int:
        return 0

    def close(self) -> None: ...


@pytest.mark.parametrize(("on_gpu", "tokens"), [(True, PROMPT_TOKENS), (False, CPU_TOKENS)])
def test_a_short_prompt_and_a_step_are_computed(on_gpu: bool, tokens: int) -> None:
    stage = SeenStage()
    run_first_passes(stage, 512, on_gpu=on_gpu)
    assert [(row.pos0, row.n) for row in stage.rows] == [(0, tokens), (tokens, 1)]
    assert not stage.held
    first = stage.tensors[0]
    assert first["hidden"].numpy().shape == (tokens, 3)
    assert first["extra"].numpy().shape == (tokens, 2, 2) and not first["extra"].numpy().any()


@pytest.mark.parametrize(("context", "tokens"), [(1, []), (2, [1, 1]), (6, [5, 1])])
def test_a_short_context_is_not_exceeded(context: int, tokens: list[int]) -> None:
    stage = SeenStage()
    run_first_passes(stage, context, on_gpu=True)
    assert [row.n for row in stage.rows] == tokens


def test_a_row_that_is_refused_is_an_error_and_leaves_no_sequence() -> None:
    stage = SeenStage(refused=PROMPT_TOKENS)
    with pytest.raises(EngineError, match="no"):
        run_first_passes(stage, 512, on_gpu=True)
    assert not stage.held


def worker_for(stage: SeenStage, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Worker:
    """A worker that will load this stage, the first of PLAN."""

    class SeenProvider:
        def create(self) -> SeenStage:
            return stage

    monkeypatch.setattr(worker_module, "provider", lambda name: SeenProvider())
    return Worker(replace(StageSetup(PLAN, 0, Path(), {}, 8), **changes))


def loaded(stage: SeenStage, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Worker:
    worker = worker_for(stage, monkeypatch, **changes)
    worker.load(lambda done, total: None)
    return worker


def test_a_ring_whose_load_took_long_is_not_idle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_for(SeenStage(), monkeypatch)
    worker.rest._used_at -= IDLE_AFTER_S
    worker.load(lambda done, total: None)
    assert not worker.rest.is_idle


def test_a_stage_is_warmed_up_once_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SeenStage()
    assert loaded(stage, monkeypatch).progress == 2
    assert stage.warmed == [512]


def test_a_warm_up_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SeenStage()
    loaded(stage, monkeypatch, warms_up=False)
    assert not stage.warmed


def test_a_warm_up_that_fails_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loaded(SeenStage(refused=0), monkeypatch)
    assert "the warm-up failed, and the first request may fail too: no" in caplog.text


@pytest.mark.parametrize("skip", [False, True])
def test_the_setting_reaches_the_runner(skip: bool) -> None:
    lease = Lease(PLAN, 0, 1.0)
    start = start_message(lease, Path("m"), Settings(Path("home"), "a node", skip_warmup=skip), None)
    assert _setup(start).warms_up is not skip


@pytest.mark.parametrize("name", ["numpy", "mlx", "torch", "llamacpp"])
def test_an_engine_computes_the_same_after_its_warm_up(name: str, tmp_path: Path) -> None:
    engine = load_registry().providers.get(name)
    if engine is None or not engine.availability().available:
        pytest.skip(f"{name} cannot run here")
    directory = write_checkpoint(tmp_path, TinyModel(layers=2))
    found = []
    for warms_up in (False, True):
        stage = engine.create()
        stage.load(LoadRequest(Shard("tiny", 0, 2, 2), directory, 64, {}), lambda done, total: None)
        if warms_up:
            stage.warm_up(64)  # type: ignore[attr-defined]
            assert not list(stage.sequences())
        stage.insert(1, 8)
        output = stage.forward(StageInput((Row(1, 0, 4, 4),), (1, 2, 3, 4), {}))
        assert output.logits is not None
        found.append(output.logits.copy())
        stage.close()
    assert np.array_equal(found[0], found[1])

"""What every engine must do, shown on a two-stage split of a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, util
from pathlib import Path

import numpy as np
import pytest

from exo_mesh.domain.frame import HIDDEN, Fault, Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import EngineProvider, LoadRequest, StageEngine, StageInput, StageOutput
from exo_mesh.errors import EngineError
from tests.support.checkpoints import TinyModel, write_checkpoint

MODEL = TinyModel("llama", layers=4)
TOKENS = np.random.default_rng(5).integers(32, 127, 64).astype(np.int32)


@dataclass(frozen=True)
class Engine:
    """A package, the options to load its stages with, and how far its results may lie apart in other company.

    slack: 0 for the same bits; else the largest difference of logits, for engines that leave the choice of kernels, and
    with it the rounding, to a BLAS that looks at the number of rows.
    """

    package: str
    options: Mapping[str, str] = field(default_factory=dict)
    slack: float = 0.0


ENGINES = [
    pytest.param(Engine("exo_mesh_dummy"), id="exo_mesh_dummy"),
    pytest.param(Engine("exo_mesh_numpy", {"mode": "deterministic"}), id="exo_mesh_numpy-deterministic"),
    pytest.param(Engine("exo_mesh_numpy", slack=1e-4), id="exo_mesh_numpy-fast"),
    pytest.param(
        Engine("exo_mesh_mlx"),
        id="exo_mesh_mlx",
        marks=pytest.mark.skipif(util.find_spec("mlx_lm") is None, reason="no mlx-lm here"),
    ),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("contract"), MODEL)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.param
    return found


@pytest.fixture(scope="module")
def provider(engine: Engine) -> EngineProvider:
    found: EngineProvider = import_module(engine.package).provider
    return found


Same = Callable[[np.ndarray, np.ndarray], None]


@pytest.fixture(scope="module")
def same(engine: Engine) -> Same:
    """Asserts that two arrays are equal, as exactly as the engine promises."""

    def check(got: np.ndarray, want: np.ndarray) -> None:
        np.testing.assert_allclose(got, want, rtol=0, atol=engine.slack)

    return check


@pytest.fixture(scope="module")
def loaded(engine: Engine, provider: EngineProvider, model_dir: Path) -> Iterator[list[StageEngine]]:
    """Two stages, loaded once; the tests use different sequences and leave none behind."""
    stages = []
    for start, stop in ((0, 1), (1, 4)):
        stage = provider.create()
        request = LoadRequest(Shard("tiny", start, stop, 4), model_dir, MODEL.context, engine.options)
        stage.load(request, lambda done, total: None)
        stages.append(stage)
    yield stages
    for stage in stages:
        stage.close()


@pytest.fixture
def stages(loaded: list[StageEngine]) -> Iterator[list[StageEngine]]:
    yield loaded
    for stage in loaded:
        for sequence in list(stage.sequences()):
            stage.remove(sequence)


def insert(stages: Sequence[StageEngine], *sequences: int, max_tokens: int = 64) -> None:
    for stage in stages:
        for sequence in sequences:
            stage.insert(sequence, max_tokens)


def forward(stages: Sequence[StageEngine], rows: Sequence[Row], tokens: Sequence[int] | None = None) -> StageOutput:
    """Through all stages; tokens default to those of TOKENS at each row's positions. Faults of all stages are kept."""
    ids = np.concatenate([TOKENS[row.pos0 : row.pos0 + row.n] for row in rows]) if tokens is None else tokens
    output, faults = StageOutput(), []
    for stage in stages:
        output = stage.forward(StageInput(tuple(rows), tuple(int(i) for i in ids), output.tensors))
        faults += output.faults
    return StageOutput(output.tensors, output.logits, tuple(faults))


def logits(stages: Sequence[StageEngine], rows: Sequence[Row], tokens: np.ndarray | None = None) -> np.ndarray:
    output = forward(stages, rows, tokens)
    assert not output.faults
    assert output.logits is not None
    return output.logits


def faulted(faults: Sequence[Fault]) -> set[tuple[int, str]]:
    return {(fault.sequence, fault.code) for fault in faults}


def test_the_provider_describes_itself(provider: EngineProvider) -> None:
    assert provider.kind == "stage"
    assert provider.availability().available
    assert provider.supports("llama")
    assert provider.version()


def test_logits_are_float32_for_the_last_positions_of_each_row(stages: list[StageEngine], same: Same) -> None:
    insert(stages, 1, 2)
    got = logits(stages, [Row(1, 0, 5, 2), Row(2, 0, 3, 1)])
    assert got.shape == (3, MODEL.vocab)
    assert got.dtype == np.float32
    insert(stages, 3)
    every = logits(stages, [Row(3, 0, 5, 5)])
    same(got[:2], every[3:])


def test_a_forward_that_wants_no_logits_gives_none_but_fills_kv(stages: list[StageEngine], same: Same) -> None:
    insert(stages, 1, 2)
    assert logits(stages, [Row(1, 0, 8)]).shape == (0, MODEL.vocab)
    after = logits(stages, [Row(1, 8, 1, 1)])
    logits(stages, [Row(2, 0, 8, 1)])
    same(after, logits(stages, [Row(2, 8, 1, 1)]))


def test_hidden_rows_are_one_per_token(stages: list[StageEngine]) -> None:
    insert(stages, 1, 2)
    output = stages[0].forward(StageInput((Row(1, 0, 3), Row(2, 0, 2)), tuple(TOKENS[:5].tolist()), {}))
    assert output.logits is None
    assert output.tensors[HIDDEN].shape[0] == 5


def test_a_frame_without_rows_is_passed_on_empty(stages: list[StageEngine]) -> None:
    output = forward(stages, [], tokens=tuple(TOKENS[:0].tolist()))
    assert output.logits is not None
    assert output.logits.shape == (0, MODEL.vocab)


def test_rows_of_different_sequences_do_not_touch_each_other(stages: list[StageEngine], same: Same) -> None:
    insert(stages, 1, 2, 3)
    alone = [logits(stages, [Row(3, 0, 9, 1)]), *(logits(stages, [Row(3, i, 1, 1)]) for i in range(9, 12))]
    together = [logits(stages, [Row(2, 0, 4), Row(1, 0, 9, 1)])]
    for i in range(3):
        together.append(logits(stages, [Row(1, 9 + i, 1, 1), Row(2, 4 + i, 1, 1)])[:1])
    same(np.concatenate(alone), np.concatenate(together))


def test_rolling_back_and_appending_again_forgets_what_was_there(stages: list[StageEngine], same: Same) -> None:
    insert(stages, 1, 2)
    logits(stages, [Row(1, 0, 10, 1)])
    logits(stages, [Row(1, 10, 4, 4)], tokens=TOKENS[40:44])
    again = logits(stages, [Row(1, 7, 5, 1)])
    logits(stages, [Row(2, 0, 7, 1)])
    same(again, logits(stages, [Row(2, 7, 5, 1)]))


def test_a_sequence_can_begin_anew_at_position_0(stages: list[StageEngine], same: Same) -> None:
    insert(stages, 1)
    first = logits(stages, [Row(1, 0, 6, 1)])
    same(first, logits(stages, [Row(1, 0, 6, 1)]))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Row(1, 7, 2, 1), "a gap"),
        (Row(99, 0, 2, 1), "an unknown sequence"),
        (Row(1, 4, 9, 1), "more than was inserted for"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_row_is_a_fault_of_its_sequence_only(stages: list[StageEngine], same: Same, bad: Row, why: str) -> None:
    insert(stages, 1, max_tokens=12)
    insert(stages, 2, 3)
    logits(stages, [Row(1, 0, 4), Row(2, 0, 4), Row(3, 0, 4)])
    want = logits(stages, [Row(3, 4, 2, 1)])
    output = forward(stages, [bad, Row(2, 4, 2, 1)])
    assert (bad.sequence, "bad_row") in faulted(output.faults), why
    assert {fault.sequence for fault in output.faults} == {bad.sequence}
    assert output.logits is not None
    assert output.logits.shape == (2, MODEL.vocab)
    assert np.isfinite(output.logits).all()
    same(output.logits[1:], want)


def test_a_token_id_outside_the_vocabulary_is_a_fault(stages: list[StageEngine]) -> None:
    insert(stages, 1)
    output = forward(stages, [Row(1, 0, 2, 1)], tokens=np.array([5, MODEL.vocab], np.int32))
    assert faulted(output.faults) == {(1, "bad_row")}


def test_a_fault_leaves_the_sequence_as_it_was(stages: list[StageEngine], same: Same) -> None:
    insert(stages, 1, 2)
    logits(stages, [Row(1, 0, 4), Row(2, 0, 4)])
    assert forward(stages, [Row(1, 9, 1, 1)]).faults
    same(logits(stages, [Row(1, 4, 1, 1)]), logits(stages, [Row(2, 4, 1, 1)]))


def test_inserting_again_changes_nothing(stages: list[StageEngine], same: Same) -> None:
    insert(stages, 1, 2)
    logits(stages, [Row(1, 0, 4), Row(2, 0, 4)])
    insert(stages, 1)
    assert sorted(stages[0].sequences()) == [1, 2]
    same(logits(stages, [Row(1, 4, 1, 1)]), logits(stages, [Row(2, 4, 1, 1)]))


def test_removing_frees_kv_and_an_unknown_sequence_is_no_error(stages: list[StageEngine]) -> None:
    before = [stage.memory_bytes() for stage in stages]
    insert(stages, 1)
    logits(stages, [Row(1, 0, 40, 1)])
    assert all(stage.memory_bytes() > was for stage, was in zip(stages, before, strict=True))
    for stage in stages:
        stage.remove(1)
        stage.remove(77)
        assert not stage.sequences()
    assert [stage.memory_bytes() for stage in stages] == before
    assert faulted(forward(stages, [Row(1, 0, 1, 1)]).faults) == {(1, "bad_row")}


def test_activations_of_the_wrong_length_are_an_engine_error(stages: list[StageEngine]) -> None:
    insert(stages, 1)
    hidden = stages[0].forward(StageInput((Row(1, 0, 3),), tuple(TOKENS[:3].tolist()), {}))
    with pytest.raises(EngineError, match="expected"):
        stages[1].forward(StageInput((Row(1, 0, 2, 1),), tuple(TOKENS[:2].tolist()), hidden.tensors))


def test_an_engine_that_promises_the_same_bits_is_held_to_it(engine: Engine, stages: list[StageEngine]) -> None:
    assert engine.slack == 0 or not any(stage.capabilities.row_exact for stage in stages)


def test_an_engine_that_is_not_loaded_says_so(provider: EngineProvider) -> None:
    with pytest.raises(EngineError, match="not loaded"):
        provider.create().forward(StageInput((Row(1, 0, 1, 1),), tuple(TOKENS[:1].tolist()), {}))

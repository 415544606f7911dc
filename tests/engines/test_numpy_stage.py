"""What a NumPy stage keeps, hands on and takes back."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from exo_mesh_numpy import attention, provider
from exo_mesh_numpy.engine import NumpyStage
from exo_mesh_numpy.floats import narrow_to_bfloat16

from exo_mesh.domain.frame import HIDDEN, Row
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import LoadRequest, SequenceSaver, StageInput, TensorSpec
from exo_mesh.errors import EngineError, InputError
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.ring import Ring

MODEL = TinyModel("qwen3", layers=4)
IDS = np.random.default_rng(6).integers(0, 299, 120).astype(np.int32)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("stage"), MODEL)


def stage_of(model_dir: Path, start: int, stop: int, dtype: str = "", **options: str) -> NumpyStage:
    stage = NumpyStage()
    stage.load(LoadRequest(Shard("tiny", start, stop, 4), model_dir, 512, options, dtype), lambda done, total: None)
    return stage


def run(stage: NumpyStage, row: Row, tensors: Any = None) -> Any:
    ids = tuple(IDS[row.pos0 : row.pos0 + row.n].tolist())
    return stage.forward(StageInput((row,), ids, tensors or {}))


@pytest.mark.parametrize("mode", ["fast", "deterministic"])
@pytest.mark.parametrize("length", [1, 40, 64, 65])
def test_a_restored_sequence_goes_on_with_the_same_bits(model_dir: Path, mode: str, length: int) -> None:
    first = stage_of(model_dir, 0, 4, mode=mode)
    second = stage_of(model_dir, 0, 4, mode=mode)
    assert isinstance(first, SequenceSaver)
    first.insert(1, 100)
    run(first, Row(1, 0, length))
    saved = first.save(1)
    assert saved.length == length
    second.restore(5, 100, saved)
    expected = run(first, Row(1, length, 20, 20)).logits
    np.testing.assert_array_equal(run(second, Row(5, length, 20, 20)).logits, expected)
    # the copy is one: what went on in the first stage is not in it
    second.restore(5, 100, saved)
    back = run(second, Row(5, length - 1, 1, 1)).logits
    np.testing.assert_array_equal(back, run(first, Row(1, length - 1, 1, 1)).logits)


def test_what_does_not_fit_is_not_restored(model_dir: Path) -> None:
    stage = stage_of(model_dir, 0, 2)
    stage.insert(1, 40)
    run(stage, Row(1, 0, 30))
    saved = stage.save(1)
    other = stage_of(model_dir, 1, 4)
    with pytest.raises(EngineError, match=r"expected float32\[3, 2, 30, 16\], got float32\[2, 2, 30, 16\]"):
        other.restore(1, 40, saved)
    with pytest.raises(EngineError, match="at most 29"):
        other.restore(1, 29, saved)
    assert not other.sequences()
    with pytest.raises(EngineError, match="got nothing"):
        stage.restore(1, 40, msgspec.structs.replace(saved, tensors={"keys": saved.tensors["keys"]}))
    assert stage.save(1).length == 30, "a refused restore changed the sequence"
    with pytest.raises(EngineError, match="sequence 9 is not known"):
        stage.save(9)


def test_a_stage_tells_what_it_takes_and_gives(model_dir: Path) -> None:
    def spec(dtype: str) -> tuple[TensorSpec, ...]:
        return (TensorSpec(HIDDEN, dtype, (MODEL.hidden,)),)

    first, middle, last = (stage_of(model_dir, *span).capabilities for span in ((0, 1), (1, 3), (3, 4)))
    assert (first.inputs, first.outputs) == ((), spec("float32"))
    assert (middle.inputs, middle.outputs) == (spec("float32"), spec("float32"))
    assert (last.inputs, last.outputs) == (spec("float32"), ())
    assert stage_of(model_dir, 0, 1, "bfloat16").capabilities.outputs == spec("bfloat16")
    assert first.ragged and first.cuts_anywhere and first.kv == ("full",)
    assert set(first.dtypes) == {"float32", "float16", "bfloat16"}


@pytest.mark.parametrize(("dtype", "digits"), [("float16", 11), ("bfloat16", 8)])
def test_activations_go_out_rounded_and_come_in_exactly(model_dir: Path, dtype: str, digits: int) -> None:
    plain, rounded, last = stage_of(model_dir, 0, 2), stage_of(model_dir, 0, 2, dtype), stage_of(model_dir, 2, 4)
    for stage in (plain, rounded, last):
        stage.insert(1, 30)
    exact = run(plain, Row(1, 0, 30)).tensors[HIDDEN].numpy()
    tensor = run(rounded, Row(1, 0, 30)).tensors[HIDDEN]
    assert (tensor.dtype, tensor.shape) == (dtype, exact.shape)
    wide = widened(tensor)
    assert np.abs(wide / exact - 1).max() <= 2.0**-digits
    got = run(last, Row(1, 0, 30, 30), {HIDDEN: tensor}).logits
    expected = run(last, Row(1, 0, 30, 30), {HIDDEN: Tensor.from_numpy(wide)}).logits
    np.testing.assert_array_equal(got, expected)


def widened(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == "float16":
        return tensor.numpy().astype(np.float32)
    wide: np.ndarray = (tensor.numpy().astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(narrow_to_bfloat16(wide), tensor.numpy())
    return wide


def test_an_activation_dtype_that_it_cannot_hand_on_is_refused(model_dir: Path) -> None:
    with pytest.raises(InputError, match="int32"):
        stage_of(model_dir, 0, 2, "int32")


def test_activations_of_a_dtype_that_it_does_not_take_are_refused(model_dir: Path) -> None:
    last = stage_of(model_dir, 2, 4)
    last.insert(1, 8)
    with pytest.raises(EngineError, match=r"expected activations \[3, 64\] of float32, .*, got int32\[3, 64\]"):
        run(last, Row(1, 0, 3, 1), {HIDDEN: Tensor.from_numpy(np.zeros((3, 64), np.int32))})


@pytest.mark.parametrize("mode", ["fast", "deterministic"])
def test_rows_of_one_sequence_in_one_frame_are_done_in_order(model_dir: Path, mode: str) -> None:
    """A row may go on where the one before it ended, or take back some of it."""
    stage = stage_of(model_dir, 0, 4, mode=mode)
    stage.insert(1, 100)
    stage.insert(2, 100)
    rows = (Row(1, 0, 40, 1), Row(2, 0, 3), Row(1, 40, 2, 2), Row(1, 20, 22, 22))
    ids = np.concatenate([IDS[row.pos0 : row.pos0 + row.n] for row in rows])
    got = stage.forward(StageInput(rows, tuple(ids.tolist()), {})).logits
    assert got is not None
    whole = run(stage, Row(2, 0, 42, 42)).logits
    np.testing.assert_allclose(got, np.concatenate([whole[39:40], whole[40:42], whole[20:42]]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", ["fast", "deterministic"])
@pytest.mark.parametrize("max_scores", [1, 700, 5000])
def test_long_contexts_are_attended_in_pieces_with_the_same_result(
    model_dir: Path, mode: str, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_of(model_dir, 0, 4, mode=mode)
    stage.insert(1, 120)
    expected = run(stage, Row(1, 0, 120, 120)).logits
    monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
    stage.insert(2, 120)
    got = run(stage, Row(2, 0, 120, 120)).logits
    np.testing.assert_allclose(got, expected, rtol=0, atol=0 if mode == "deterministic" else 1e-4)


def test_a_large_gate_overflows_to_the_right_limit(tmp_path: Path) -> None:
    """exp of a large number is infinite on the way; no warning is raised, and the logits are finite."""
    write_checkpoint(tmp_path, dataclasses.replace(MODEL, arch="llama"))
    ring = Ring(provider, tmp_path, 4, (2,))
    for stage in ring.stages:
        for layer in stage.weights.layers:  # type: ignore[attr-defined]
            layer.gate_up.weight[: MODEL.intermediate] *= 200
    ring.insert(1)
    assert np.isfinite(ring.forward([Row(1, 0, 20, 20)], IDS[:20])).all()


def test_scratch_does_not_grow_with_the_frame(model_dir: Path) -> None:
    stage = stage_of(model_dir, 0, 2)
    stage.insert(1, 2000)
    scratch = stage._loaded().decoder._scratch

    def fill(num_tokens: int) -> int:
        ids = tuple(np.resize(IDS, num_tokens).tolist())
        stage.forward(StageInput((Row(1, 0, num_tokens),), ids, {}))
        return scratch.num_bytes - scratch.take("scores", 1).base.nbytes

    # attention's scores grow with the context, up to a bound of their own
    assert fill(1900) == fill(256)


def test_memory_may_be_asked_from_another_thread_while_sequences_come_and_go(model_dir: Path) -> None:
    stage = stage_of(model_dir, 0, 1)
    done = threading.Event()
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            while not done.is_set():
                assert stage.memory_bytes() > 0
                stage.sequences()
        except BaseException as exc:  # noqa: BLE001 - handed to the test
            failures.append(exc)

    asking = threading.Thread(target=ask)
    asking.start()
    for sequence in range(100):
        stage.insert(sequence, 8)
        run(stage, Row(sequence, 0, 2))
        if sequence % 3:
            stage.remove(sequence)
    done.set()
    asking.join(10)
    assert not failures and not asking.is_alive()

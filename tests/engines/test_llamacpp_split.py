"""Stages of llama.cpp give the bits of the whole model, share rings with NumPy, and keep sequences apart."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exo_mesh_llamacpp import provider as llamacpp
from exo_mesh_llamacpp.context import MAX_LOGITS, MAX_TOKENS, StageShape, pass_tokens
from exo_mesh_llamacpp.pools import FIRST_CELLS, _moves
from exo_mesh_llamacpp.states import of_one_stream, of_streams

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import EngineProvider, LoadRequest, StageEngine
from exo_mesh.errors import EngineError, InputError, ModelError
from tests.support.checkpoints import TinyModel, write_checkpoint
from tools.stages import forward, insert, remove

pytestmark = pytest.mark.skipif(not llamacpp.availability().available, reason="xllamacpp is not installed")

LAYERS = 4
MIXED = 2e-5
"""Largest difference of logits in a ring with another engine, relative to their size."""

TOKENS = np.random.default_rng(4).integers(0, 299, (6, 2048))


def tiny(directory: Path, arch: str = "llama", **changes: Any) -> Path:
    """A model whose rows divide into the blocks of every type."""
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 256, "layers": LAYERS, "context": 2048}
    return write_checkpoint(directory, TinyModel(arch, **{**sizes, **changes}))


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("split"), request.param)


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("llama"))


def stage(
    directory: Path, start: int, stop: int, engine: EngineProvider = llamacpp, dtype: str = "", **options: str
) -> StageEngine:
    own = {"threads": "1", **options} if engine is llamacpp else {}
    made = engine.create()
    request = LoadRequest(Shard("tiny", start, stop, LAYERS), directory, 2048, own, dtype)
    made.load(request, lambda done, total: None)
    return made


def ring(directory: Path, cuts: Sequence[int], **options: str) -> list[StageEngine]:
    return [stage(directory, *span, **options) for span in zip((0, *cuts), (*cuts, LAYERS), strict=True)]


def step(stages: Sequence[StageEngine], *rows: Row) -> np.ndarray:
    ids = np.concatenate([TOKENS[row.sequence % 6, row.pos0 : row.pos0 + row.n] for row in rows])
    return forward(stages, rows, ids)


def script(stages: Sequence[StageEngine]) -> np.ndarray:
    """Ragged prefills, decode steps beside them, two rollbacks, and steps of all sequences together."""
    insert(stages, (1, 2, 3, 4), 200)
    got = [
        step(stages, Row(1, 0, 37, 2), Row(2, 0, 5, 1)),
        step(stages, Row(1, 37, 1, 1), Row(3, 0, 100, 1), Row(2, 5, 1, 1), Row(4, 0, 70, 70)),
        step(stages, Row(3, 60, 1, 1), Row(1, 30, 3, 3), Row(2, 6, 1, 1)),
    ]
    got += [
        step(stages, Row(2, 7 + i, 1, 1), Row(4, 70 + i, 1, 1), Row(1, 33 + i, 1, 1), Row(3, 61 + i, 1, 1))
        for i in range(4)
    ]
    for one in stages:
        one.close()
    return np.concatenate(got)


def difference(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.sqrt(np.mean(np.square(want))))


@pytest.mark.parametrize("quant", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q6_k"])
def test_two_and_three_stages_give_the_bits_of_one(model_dir: Path, quant: str) -> None:
    want = script(ring(model_dir, (), quant=quant))
    assert np.isfinite(want).all() and want.std() > 0.3
    for cuts in ((1,), (2,), (3,), (1, 3)) if quant in ("f32", "q8_0") else ((1, 2),):
        np.testing.assert_array_equal(script(ring(model_dir, cuts, quant=quant)), want)


@pytest.mark.parametrize(
    "options",
    [{"kv": "f32"}, {"flash": "on"}, {"kv": "q8_0", "flash": "on"}, {"kv": "q4_0", "flash": "on"}, {"unified": "on"}],
    ids=str,
)
def test_every_kind_of_kv_is_split_without_a_change(llama_dir: Path, options: dict[str, str]) -> None:
    want = script(ring(llama_dir, (), **options))
    np.testing.assert_array_equal(script(ring(llama_dir, (1, 2), **options)), want)


def test_quantised_weights_compute_nearly_the_same(llama_dir: Path) -> None:
    want = script(ring(llama_dir, (), quant="f32"))
    worst = {quant: difference(script(ring(llama_dir, (2,), quant=quant)), want) for quant in ("f16", "q8_0", "q4_0")}
    assert 0 < worst["f16"] < 0.02 < worst["q8_0"] < 0.25 < worst["q4_0"] < 3, worst


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("other", ["numpy", "torch", "mlx"])
def test_a_ring_with_another_engine_computes_what_that_engine_computes(
    model_dir: Path, other: str, first: bool
) -> None:
    for package in {"torch": ("torch", "transformers"), "mlx": ("mlx_lm",)}.get(other, ()):
        pytest.importorskip(package)
    engine: EngineProvider = import_module(f"exo_mesh_{other}").provider
    want = script([stage(model_dir, 0, LAYERS, engine, "float32")])
    order = (llamacpp, engine) if first else (engine, llamacpp)
    mixed = [stage(model_dir, 0, 2, order[0], "float32"), stage(model_dir, 2, LAYERS, order[1], "float32")]
    assert difference(script(mixed), want) <= MIXED


def test_a_sequence_that_outgrows_its_room_moves_with_what_it_holds(llama_dir: Path) -> None:
    stages = ring(llama_dir, (2,), kv="f32")
    insert(stages, (1, 2), 2048)
    step(stages, Row(1, 0, FIRST_CELLS - 1), Row(2, 0, FIRST_CELLS - 1))
    held = [one.memory_bytes() for one in stages]
    step(stages, Row(1, FIRST_CELLS - 1, 1))
    assert [one.memory_bytes() for one in stages] == held
    got = step(stages, Row(1, FIRST_CELLS, 1, 1), Row(2, FIRST_CELLS - 1, 1, 1))
    assert all(one.memory_bytes() > was for one, was in zip(stages, held, strict=True))
    insert(stages, (7,), 2048)  # sequence 7 has the tokens of sequence 1
    want = step(stages, Row(7, 0, FIRST_CELLS + 1, 1))
    assert difference(got[:1], want) < 1e-5
    remove(stages, (1, 2, 7))
    assert not stages[0].sequences()


def test_rows_longer_than_a_pass_of_the_library_are_computed_in_pieces(llama_dir: Path) -> None:
    stages = ring(llama_dir, (2,), kv="f32")
    insert(stages, (1, 7), 2048)
    want = np.concatenate([step(stages, Row(1, pos0, 100, 100)) for pos0 in range(0, 1200, 100)])
    got = step(stages, Row(7, 0, 1200, 1200))
    assert 2 * MAX_TOKENS < 1200
    assert difference(got, want) < 1e-5


def test_sequences_that_compute_together_come_to_lie_side_by_side(llama_dir: Path) -> None:
    """Two batches whose sequences began in turns. Their results stay what they were alone."""
    stages = ring(llama_dir, (2,), kv="f32")
    batches = ((1, 3, 5), (2, 4))
    insert(stages, (1, 2, 3, 4, 5), 512)
    for sequence in (1, 2, 3, 4, 5):
        step(stages, Row(sequence, 0, 8))
    got: dict[int, list[np.ndarray]] = {sequence: [] for batch in batches for sequence in batch}
    for pos0 in range(8, 40):
        for batch in batches:
            logits = step(stages, *(Row(sequence, pos0, 1, 1) for sequence in batch))
            for sequence, row in zip(batch, logits, strict=True):
                got[sequence].append(row)
    for one in stages:
        held = one._loaded().pools.held  # type: ignore[attr-defined]
        for batch in batches:
            slots = sorted(held[sequence].place[1] for sequence in batch)
            assert slots == list(range(slots[0], slots[0] + len(batch)))
    remove(stages, (1, 2, 3, 4, 5))
    for sequence, rows in got.items():
        insert(stages, (sequence,), 512)
        want = step(stages, Row(sequence, 0, 40, 32))
        assert difference(np.stack(rows), want) < 1e-5
        remove(stages, (sequence,))


@pytest.mark.parametrize("cuts", [(), (2,)], ids=str)
def test_more_sequences_find_room_than_logits_in_one_pass(llama_dir: Path, cuts: tuple[int, ...]) -> None:
    stages, numbers = ring(llama_dir, cuts, kv="f32"), tuple(range(MAX_LOGITS + 20))
    insert(stages, numbers, 100)
    got = step(stages, *(Row(number, 0, 3, 1) for number in numbers))
    for kind in range(6):
        assert difference(got[kind::6], got[kind : kind + 1]) < 1e-5, "rows of equal tokens"
    assert len(got) == len(numbers)
    for one in stages:
        one.close()


def test_slots_are_moved_as_little_as_possible() -> None:
    for slots, most in (((0, 2, 4), 2), ((5, 7), 2), ((0, 3, 6, 7), 4), ((0, 7), 2), ((1, 2, 3, 6), 2)):
        moves = _moves(slots, 8)
        assert len(moves) <= most
        assert sorted(moves) == sorted(moves.values()), "those in the way go where the others were"
        after = {moves.get(slot, slot) for slot in slots}
        assert after == set(range(min(after), min(after) + len(slots)))


@pytest.mark.parametrize(("num_streams", "slot"), [(1, 0), (4, 2), (4, 0), (4, 3)])
def test_a_state_fits_contexts_with_other_numbers_of_slots(num_streams: int, slot: int) -> None:
    cells = np.array([3, 0, 7, 0], "<u4")
    words = [0xAF143CD8, slot, num_streams, *[0] * slot, *cells, *[0] * (num_streams - 1 - slot)]
    saved = np.array(words, "<u4").view(np.uint8)
    kept = of_one_stream(saved)
    np.testing.assert_array_equal(kept.view("<u4"), [0xAF143CD8, 0, 1, *cells])
    again = of_streams(kept, 1, 3).view("<u4")
    np.testing.assert_array_equal(again, [0xAF143CD8, 1, 3, *cells, 0, 0])
    np.testing.assert_array_equal(of_one_stream(again.view(np.uint8)), kept)


def test_a_sequence_without_a_number_leaves_the_others_alone(llama_dir: Path) -> None:
    """NaN that comes in from the previous stage stays in the rows of its sequence."""
    from exo_mesh.domain.frame import HIDDEN
    from exo_mesh.domain.tensor import Tensor
    from exo_mesh.engine.contract import StageInput

    (last,) = [stage(llama_dir, 2, LAYERS, kv="f32")]
    hidden = np.random.default_rng(1).standard_normal((2, 256), np.float32)
    for spoilt in (False, True):
        last.insert(1, 20)
        last.insert(2, 20)
        if spoilt:
            hidden[0] = np.nan
        rows = (Row(1, 0, 1, 1), Row(2, 0, 1, 1))
        logits = last.forward(StageInput(rows, (1, 2), {HIDDEN: Tensor.from_numpy(hidden)})).logits
        assert logits is not None
        assert np.isnan(logits[0]).all() == spoilt
        assert np.isfinite(logits[1]).all()
        last.remove(1)
        last.remove(2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quant": "q3"}, "q8_0"),
        ({"kv": "q8_0"}, "flash=on"),
        ({"threads": "0"}, "threads"),
        ({"gpu_layers": "-1"}, "gpu_layers"),
        ({"flash": "maybe"}, "flash"),
        ({"gpu_layers": "4"}, "has no GPU"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(llama_dir: Path, options: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        stage(llama_dir, 0, LAYERS, **options)


def test_a_library_that_is_none_is_refused(llama_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "none.so").write_bytes(b"no library")
    with pytest.raises(EngineError, match=r"none\.so is not a library"):
        stage(llama_dir, 0, LAYERS, library=str(tmp_path / "none.so"))
    import _ctypes

    with pytest.raises(EngineError, match="does not export"):
        stage(llama_dir, 0, LAYERS, library=_ctypes.__file__)


def test_a_package_is_named_whose_library_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from exo_mesh_llamacpp.library_file import chosen_library

    with pytest.raises(EngineError, match=r"library=llama_cpp: llama-cpp-python is not installed"):
        chosen_library({"library": "llama_cpp"})
    (tmp_path / "llama_cpp" / "lib").mkdir(parents=True)
    (tmp_path / "llama_cpp" / "__init__.py").touch()
    info = tmp_path / "llama_cpp_python-0.3.36.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.3.36\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineError, match=r"llama-cpp-python 0\.3\.36 has no llama\.cpp library"):
        chosen_library({"library": "llama_cpp"})
    file = tmp_path / "llama_cpp" / "lib" / "libllama.so"
    file.touch()
    found = chosen_library({"library": "llama_cpp"})
    assert found is not None and (found.path, found.version) == (file, "llama-cpp-python 0.3.36")


def test_a_checkpoint_that_is_quantised_already_is_refused(tmp_path: Path) -> None:
    import json

    directory = tiny(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization": {"bits": 4, "group_size": 64}}))
    with pytest.raises(ModelError, match="quantization"):
        stage(directory, 0, LAYERS)


def test_passes_are_smaller_where_there_are_many_positions() -> None:
    def tokens(num_heads: int, cells: int, slots: int = 1, **changes: Any) -> int:
        settings = {"kv": "f16", "flash": False, "unified": False, "threads": 1, **changes}
        return pass_tokens(StageShape(64, 0, num_heads, **settings), slots, cells)

    assert [tokens(32, cells) for cells in (512, 2048, 4096, 32768, 2**20)] == [512, 512, 256, 32, 32]
    assert tokens(32, 512, slots=16) == 512
    assert tokens(32, 512, slots=16, unified=True) == 128
    assert tokens(32, 32768, flash=True) == 512


def test_a_long_context_is_computed_in_smaller_passes_with_the_same_bits_in_parts(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exo_mesh_llamacpp.context.SCORES_BYTES", 4 * 4 * 512 * 40)
    whole = script(ring(llama_dir, ()))
    np.testing.assert_array_equal(script(ring(llama_dir, (1, 3))), whole)
    monkeypatch.undo()
    assert difference(whole, script(ring(llama_dir, ()))) < 0.01

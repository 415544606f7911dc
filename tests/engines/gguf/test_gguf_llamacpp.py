"""Stages of llama.cpp from GGUF files give the bits that the library gives for the whole file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from exo_mesh_llamacpp import provider as llamacpp
from exo_mesh_llamacpp.canary_models import write_random
from exo_mesh_llamacpp.container import Value
from exo_mesh_llamacpp.stage import LlamaCppStage
from exo_mesh_llamacpp.whole import load_whole
from exo_mesh_numpy import provider as numpy_engine

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import EngineProvider, LoadRequest, StageEngine, Surveyor
from exo_mesh.errors import EngineError, InputError, ModelError
from exo_mesh.weights.fetched import LayerPieces
from exo_mesh.weights.gguf import read_gguf
from exo_mesh.weights.gguf_layout import make_texts
from exo_mesh.weights.tensors import read_stage_tensors
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.gguf_twin import write_gguf_twin
from tools.stages import forward, insert

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(not llamacpp.availability().available, reason="xllamacpp is not installed")

LAYERS = 4
TOKENS = np.random.default_rng(8).integers(0, 256, (4, 128))
MIXED = 2e-5
TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0")


def twin(directory: Path, arch: str = "llama", quantisation: str = "F32", *, shards: int = 1, **sizes: int) -> Path:
    """The directory of a GGUF model."""
    model = TinyModel(arch, layers=LAYERS, **{"hidden": 64, "intermediate": 128, **sizes})
    origin = write_checkpoint(directory / "origin", model)
    place = directory / "twin"
    place.mkdir()
    write_gguf_twin(origin, place / "tiny.gguf", quantisation, shards=shards)
    for name, text in make_texts(place).items():
        (place / name).write_bytes(text)
    return place


def request(directory: Path, start: int, stop: int, dtype: str = "", **options: str) -> LoadRequest:
    return LoadRequest(Shard("tiny", start, stop, LAYERS), directory, 256, options, dtype)


def stages(
    directory: Path, cuts: Sequence[int], engines: Sequence[EngineProvider] = (), dtype: str = ""
) -> list[StageEngine]:
    made: list[StageEngine] = []
    for index, (start, stop) in enumerate(zip((0, *cuts), (*cuts, LAYERS), strict=True)):
        engine = engines[index] if engines else llamacpp
        options = {"threads": "1"} if engine is llamacpp else {}
        stage = engine.create()
        stage.load(request(directory, start, stop, dtype, **options), lambda done, total: None)
        made.append(stage)
    return made


def script(ring: Sequence[StageEngine]) -> np.ndarray:
    """Prompts together, decode steps, a rollback; closes the stages."""
    insert(ring, (0, 1), 100)
    frames = (
        (Row(0, 0, 20, 20), Row(1, 0, 9, 1)),
        (Row(0, 20, 1, 1), Row(1, 9, 1, 1)),
        (Row(1, 10, 1, 1), Row(0, 15, 3, 3)),
        (Row(0, 18, 1, 1), Row(1, 11, 1, 1)),
    )
    got = [
        forward(ring, rows, np.concatenate([TOKENS[row.sequence, row.pos0 : row.pos0 + row.n] for row in rows]))
        for rows in frames
    ]
    for stage in ring:
        stage.close()
    return np.concatenate(got)


def whole(directory: Path, file: str = "tiny.gguf") -> list[StageEngine]:
    """llama.cpp itself: the file as it is, token ids in."""
    stage = LlamaCppStage(lambda asked, _: load_whole(directory / file, asked))
    stage.load(request(directory, 0, LAYERS, threads="1"), lambda done, total: None)
    return [stage]


@pytest.mark.parametrize("quantisation", TYPES)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_stages_of_a_file_give_the_bits_of_the_whole_file(tmp_path: Path, arch: str, quantisation: str) -> None:
    directory = twin(tmp_path, arch, quantisation)
    want = script(whole(directory))
    assert np.isfinite(want).all() and want.std() > 0.3
    for cuts in ((), (1,), (3,), (1, 2)):
        np.testing.assert_array_equal(script(stages(directory, cuts)), want)


def test_a_file_in_shards_is_the_same_model(tmp_path: Path) -> None:
    one, three = twin(tmp_path / "one"), twin(tmp_path / "three", shards=3)
    assert len(list(three.glob("*.gguf"))) == 3
    np.testing.assert_array_equal(script(stages(three, (2,))), script(stages(one, ())))


@pytest.mark.parametrize("order", [(llamacpp, numpy_engine), (numpy_engine, llamacpp)], ids=["before", "after"])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_ring_with_numpy_reads_the_same_file(
    tmp_path: Path, arch: str, order: tuple[EngineProvider, EngineProvider]
) -> None:
    directory = twin(tmp_path, arch)
    want = script(stages(directory, (), [numpy_engine]))
    got = script(stages(directory, (2,), order, "float32"))
    assert np.abs(got - want).max() <= MIXED * np.sqrt(np.mean(np.square(want)))


@pytest.mark.parametrize("quantisation", ["F32", "Q4_0"])
def test_the_survey_of_a_file_says_what_stages_hold(tmp_path: Path, quantisation: str) -> None:
    directory = twin(tmp_path, quantisation=quantisation)
    assert isinstance(llamacpp, Surveyor)
    survey = llamacpp.survey(directory, {})
    assert survey.legal_cuts == (1, 2, 3)
    first, last = stages(directory, (1,))
    head = sum(survey.layer_bytes[1:]) + survey.head_bytes
    assert last.memory_bytes() == head
    stub = first.memory_bytes() - survey.layer_bytes[0] - survey.embed_bytes
    assert 0 < stub < 10_000 + 32 * 64 * 4, "a stage before the last one holds a head of 32 tokens besides"
    first.close()
    last.close()


def test_a_file_that_is_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    directory = twin(tmp_path)
    file = directory / "tiny.gguf"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(ModelError, match=r"tiny\.gguf.*cut short"):
        stages(directory, ())


def test_an_architecture_that_is_not_proved_is_refused_by_name(tmp_path: Path) -> None:
    directory = twin(tmp_path)
    file = directory / "tiny.gguf"
    file.write_bytes(file.read_bytes().replace(b"llama", b"gemmy"))
    with pytest.raises(ModelError, match='does not split "gemmy"'):
        stages(directory, ())


def test_a_file_is_not_quantised_again(tmp_path: Path) -> None:
    directory = twin(tmp_path)
    with pytest.raises(InputError, match="quant=q8_0"):
        llamacpp.create().load(request(directory, 0, LAYERS, quant="q8_0"), lambda done, total: None)


def random_file(directory: Path, arch: str) -> Path:
    """A model of the tensors of Llama; its frequencies are divided by factors of the file, as in Llama 3."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (64, 256), "output_norm.weight": (64,)}
    if arch == "llama":
        shapes["rope_freqs.weight"] = (8,)
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": (64,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.{name}.weight": (64, 64) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {f"blk.{layer}.{name}.weight": (64, 96) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{layer}.ffn_down.weight"] = (96, 64)
    numbers = {"block_count": LAYERS, "embedding_length": 64, "feed_forward_length": 96, "context_length": 512}
    numbers |= {"attention.head_count": 4, "attention.head_count_kv": 4, "rope.dimension_count": 16, "vocab_size": 256}
    metadata: dict[str, Value] = {"general.architecture": arch, "tokenizer.ggml.model": "none"}
    metadata |= {f"{arch}.{key}": value for key, value in numbers.items()}
    metadata[f"{arch}.attention.layer_norm_rms_epsilon"] = 1e-5
    write_random(directory / "tiny.gguf", metadata, shapes)
    return directory


def test_factors_of_the_frequencies_are_in_every_stage(tmp_path: Path) -> None:
    directory = random_file(tmp_path, "llama")
    want = script(whole(directory))
    np.testing.assert_array_equal(script(stages(directory, (1, 3))), want)
    header = read_gguf(directory / "tiny.gguf")
    factors = header.table["rope_freqs.weight"]
    for start, stop in ((0, 1), (1, 3), (3, 4)):
        needed = LayerPieces(read_stage_tensors(directory), LAYERS, tied=True).of(start, stop)
        assert any(first <= factors.start and factors.stop <= last for first, last in needed["tiny.gguf"])


def test_a_stage_that_begins_where_layers_repeat_otherwise_is_refused(tmp_path: Path) -> None:
    """In SmolLM3 every fourth layer has no rotary embedding, and llama.cpp counts from the first layer of a stage."""
    directory = random_file(tmp_path, "smollm3")
    assert isinstance(llamacpp, Surveyor)
    assert llamacpp.survey(directory, {}).legal_cuts == ()
    with pytest.raises(EngineError, match="may begin at layer 1"):
        stages(directory, (1,))
    for stage in stages(directory, ()):
        stage.close()

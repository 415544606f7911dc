"""GGUF models on a hub: the header by range requests, the model's texts from it, and then the bytes of some layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from exo_mesh.models.fetcher import gguf_headers
from exo_mesh.models.fetcher.choosing import default_quantisation
from exo_mesh.models.fetcher.wire import Fetched, FetchFailed
from exo_mesh.models.file_server.listing import FileInfo
from exo_mesh.weights.card import read_card
from exo_mesh.weights.fetched import LayerPieces, read_manifest
from exo_mesh.weights.gguf import read_gguf
from exo_mesh.weights.tensors import read_tensor_table
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.fetcher_child import FetcherChild
from tests.support.hub import LoopbackHub

pytest.importorskip("gguf")

from tests.support.gguf_twin import write_gguf_twin

SHAPE = TinyModel(layers=6, hidden=128, intermediate=512, vocab=600)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one file of Q8_0, and three of F16 in a folder."""
    directory = tmp_path_factory.mktemp("gguf")
    origin = write_checkpoint(directory / "origin", SHAPE)
    (directory / "hub" / "F16").mkdir(parents=True)
    write_gguf_twin(origin, directory / "hub" / "tiny-Q8_0.gguf", "Q8_0")
    write_gguf_twin(origin, directory / "hub" / "F16" / "tiny-F16.gguf", "F16", shards=3)
    (directory / "hub" / "README.md").write_text("tiny")
    (directory / "hub" / "config.json").write_text("{}")
    return directory / "hub"


def test_a_skeleton_of_a_gguf_model_has_its_card_and_texts_and_no_weights(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, repository: Path
) -> None:
    hub.add("org/gguf", repository)
    answer = child.resolve("org/gguf:Q8_0", tmp_path / "m")
    assert not isinstance(answer, FetchFailed), answer
    file = repository / "tiny-Q8_0.gguf"
    assert read_gguf(file).num_bytes < hub.sent_of(".gguf") <= gguf_headers.FIRST_BYTES + 40 * 256
    manifest = read_manifest(tmp_path / "m")
    assert manifest is not None and manifest.repo == "org/gguf"
    assert manifest.made == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "m").iterdir() if path.suffix == ".json") == manifest.made
    assert json.loads((tmp_path / "m" / "config.json").read_text())["num_hidden_layers"] == SHAPE.layers
    card = read_card(tmp_path / "m", "tiny")
    assert card.num_layers == SHAPE.layers and card.dtype == "bfloat16"
    assert Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json")).encode("hello").tokens == list("hello")
    assert not hub.sent_of("F16.gguf") and not hub.sent_of("README.md") and not hub.sent_of("config.json")


def test_the_bytes_of_two_layers_of_a_split_model_are_fetched_and_no_others(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, repository: Path
) -> None:
    hub.add("org/gguf", repository)
    assert not isinstance(child.resolve("org/gguf:F16", tmp_path / "m"), FetchFailed)
    shards = sorted((repository / "F16").iterdir())
    headers = sum(min(gguf_headers.FIRST_BYTES, file.stat().st_size) for file in shards[:1])
    headers += sum(min(gguf_headers.SHARD_BYTES, file.stat().st_size) for file in shards[1:])
    sent = hub.sent_of(".gguf")
    assert sent <= headers + 2**15, "and the samples of the digest"
    table = read_tensor_table(tmp_path / "m")
    pieces = LayerPieces(table, SHAPE.layers, tied=False).of(4, 6)
    assert isinstance(child.fetch(tmp_path / "m", pieces), Fetched)
    wanted = sum(stop - start for spans in pieces.values() for start, stop in spans)
    assert hub.sent_of(".gguf") - sent <= wanted < 0.45 * sum(file.stat().st_size for file in shards)
    for name, spans in pieces.items():
        here = next((tmp_path / "m").glob(f"{name}*")).read_bytes()
        there = (repository / "F16" / name).read_bytes()
        assert all(here[start:stop] == there[start:stop] for start, stop in spans)


def test_a_long_header_is_read_in_steps(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, repository: Path
) -> None:
    long = tmp_path / "hub"
    long.mkdir()
    origin = write_checkpoint(tmp_path / "origin", TinyModel(layers=2, vocab=300))
    settings = json.loads((origin / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{# " + "x" * 2_500_000 + " #}"
    (origin / "tokenizer_config.json").write_text(json.dumps(settings))
    write_gguf_twin(origin, long / "tiny-F32.gguf")
    hub.add("org/long", long)
    assert not isinstance(child.resolve("org/long:F32", tmp_path / "m"), FetchFailed)
    assert len(json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())["chat_template"]) > 2_500_000


def test_what_cannot_be_run_is_refused_and_leaves_nothing_unless_only_files_are_wanted(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, repository: Path
) -> None:
    odd = tmp_path / "hub"
    shutil.copytree(repository, odd)
    raw = (odd / "tiny-Q8_0.gguf").read_bytes()
    (odd / "tiny-Q8_0.gguf").write_bytes(raw.replace(b"\x05\0\0\0\0\0\0\0gpt-2", b"\x05\0\0\0\0\0\0\0warp9", 1))
    hub.add("org/odd", odd)
    answer = child.resolve("org/odd:Q8_0", tmp_path / "models" / "m")
    assert isinstance(answer, FetchFailed) and 'in a way that is not known ("warp9")' in answer.message
    assert not list((tmp_path / "models").glob("*"))
    assert isinstance(child.pull("org/odd:Q8_0:files", tmp_path / "models" / "m"), Fetched)
    assert (tmp_path / "models" / "m" / "tiny-Q8_0.gguf").read_bytes() == (odd / "tiny-Q8_0.gguf").read_bytes()


def test_a_name_without_a_quantisation_means_the_first_one_of_a_list(
    tmp_path: Path, hub: LoopbackHub, child: FetcherChild, repository: Path
) -> None:
    hub.add("org/gguf", repository)
    assert not isinstance(child.resolve("org/gguf", tmp_path / "m"), FetchFailed)
    assert [path.name for path in (tmp_path / "m").glob("*.gguf*")] == ["tiny-Q8_0.gguf.part"]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-F16.gguf"], "Q4_K_M"),
        (["m-q5_k_m.gguf", "m-q6_k.gguf"], "Q5_K_M"),
        (["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf", "m-IQ2_XXS.gguf"], "BF16"),
        (["m.Q4_1.gguf"], "Q4_1"),
        (["m-Q3_K_M.gguf", "m-IQ4_XS.gguf"], "IQ4_XS"),
        (["m-Q5_1.gguf", "m-Q6_K_L.gguf"], "Q5_1"),
        (["m-UD-Q8_K_XL.gguf"], "UD-Q8_K_XL"),
        (["m-Q2_K.gguf", "mmproj-F16.gguf"], ""),
        (["m-Q4_K_M.gguf", "model.safetensors"], ""),
        (["README.md"], ""),
    ],
)
def test_the_default_is_good_and_never_one_that_harms_answers(names: list[str], chosen: str) -> None:
    assert default_quantisation({name: FileInfo(1) for name in names}) == chosen

"""A real model as a directory, and llama.cpp's own server with the same file. Tests are skipped without the package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from exo_mesh.weights.store import ModelStore
from tests.real.real_model import LlamaServer
from tests.support.nodes import free_port
from tests.support.tiny_gguf import RealLlamaServer
from tools.real_model import MISSING, NAME, weights_file, write_float_copy


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The GGUF file."""
    file = weights_file()
    if file is None:
        pytest.skip(MISSING)
    return file


@pytest.fixture(scope="session")
def model_dir(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that a node makes of the file: config, tokenizer, and a link."""
    store = ModelStore((model_file.parent,), views_dir=tmp_path_factory.mktemp("views"))
    return store.find(NAME)


@pytest.fixture(scope="session")
def float_copy(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same values as a float32 checkpoint in safetensors, 540 MB."""
    return write_float_copy(model_dir, tmp_path_factory.mktemp("copy") / "smollm2")


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def llama_server(model_file: Path) -> Iterator[LlamaServer]:
    """llama.cpp's server for one answer at a time, without flash attention, as the engine computes."""
    pytest.importorskip("xllamacpp")
    server = RealLlamaServer(model_file, free_port(), slots=1, context=1024, flash=False)
    server.start()
    yield LlamaServer(server.url)
    server.kill()

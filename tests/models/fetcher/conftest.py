"""One hub and one fetcher for a module; the hub's faults and counters are those of one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.fetcher_child import FetcherChild, fetcher_environ
from tests.support.hub import Faults, LoopbackHub

MODEL = TinyModel(layers=4, hidden=128, heads=4, kv_heads=2, intermediate=384, vocab=2000, shards=3)
REPO = "org/tiny"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 5 MB in three files."""
    return write_checkpoint(tmp_path_factory.mktemp("hub") / "tiny", MODEL)


@pytest.fixture(scope="module")
def module_hub(original: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub() as hub:
        hub.add(REPO, original)
        yield hub


@pytest.fixture
def hub(module_hub: LoopbackHub) -> LoopbackHub:
    module_hub.faults = Faults()
    module_hub.sent.clear()
    module_hub.requests.clear()
    return module_hub


@pytest.fixture(scope="module")
def child(module_hub: LoopbackHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FetcherChild]:
    home = tmp_path_factory.mktemp("hf")
    with FetcherChild(fetcher_environ(module_hub, home)) as fetcher:
        yield fetcher

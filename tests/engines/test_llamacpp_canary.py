"""Before its first use for an architecture, a llama.cpp library must compute a tiny model in parts as it does whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exo_mesh_llamacpp import canary, provider
from exo_mesh_llamacpp.canary_models import known
from exo_mesh_llamacpp.context import LlamaContext
from exo_mesh_llamacpp.families import FAMILIES
from exo_mesh_llamacpp.gguf_rules import RULES
from exo_mesh_llamacpp.library import open_library
from exo_mesh_llamacpp.library_file import packaged_library

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest
from exo_mesh.errors import EngineError
from tests.support.checkpoints import TinyModel, write_checkpoint

needs_library = pytest.mark.skipif(not provider.availability().available, reason="xllamacpp is not installed")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(canary, "_verdicts", {})
    yield


def load(directory: Path) -> None:
    stage = provider.create()
    try:
        stage.load(LoadRequest(Shard("tiny", 0, 2, 2), directory, 64, {"threads": "1"}), lambda done, total: None)
    finally:
        stage.close()


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, TinyModel(layers=2))


def test_every_architecture_that_the_engine_runs_has_a_tiny_model() -> None:
    assert known() == set(RULES)
    assert {family.arch for family in FAMILIES.values()} <= known()


@needs_library
def test_a_library_is_tried_once_for_an_architecture(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = canary.defect

    def noted(library: Any, arch: str, options: Any) -> str:
        asked.append(arch)
        return real(library, arch, options)

    monkeypatch.setattr(canary, "defect", noted)
    load(model_dir)
    load(model_dir)
    assert asked == ["llama"]


@needs_library
def test_a_library_whose_parts_compute_something_else_is_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LlamaContext._take

    def wrong(self: LlamaContext, tensor: int) -> None:
        real(self, tensor)
        self._tapped += 1e-3

    monkeypatch.setattr(LlamaContext, "_take", wrong)
    with pytest.raises(EngineError, match=r"is not used for llama: a tiny model of it in 2 parts differs by"):
        load(model_dir)


@needs_library
def test_an_architecture_without_a_tiny_model_is_refused() -> None:
    assert canary.defect(open_library(packaged_library()), "bert", {}) == "no tiny model of it is known"


TRY_ALL = """
import sys
from exo_mesh_llamacpp.canary import defect
from exo_mesh_llamacpp.library import open_library
from exo_mesh_llamacpp.library_file import packaged_library
for arch in sys.argv[1:]:
    print(arch, defect(open_library(packaged_library()), arch, {}) or "right", flush=True)
"""


@needs_library
@pytest.mark.slow
def test_the_installed_library_computes_every_architecture_in_parts() -> None:
    names = sorted(RULES)
    done = subprocess.run(
        [sys.executable, "-c", TRY_ALL, *names], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.splitlines() == [f"{name} right" for name in names], done.stderr[-2000:]

"""Where MLX can cut a model, as a node asks it: in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.engine.contract import Surveyor
from exo_mesh.engine.registry import provider
from exo_mesh.weights.store import SHIPPED

pytest.importorskip("mlx.core")


def ask(engine: str, model_dir: Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "exo_mesh.rings.runner.asking.survey", engine, str(model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.extended
def test_the_shipped_model_can_be_cut_anywhere() -> None:
    shipped = Path(str(resources.files("exo_mesh.weights") / "shipped" / SHIPPED))
    layers = json.loads((shipped / "config.json").read_text())["num_hidden_layers"]
    code, answer = ask("mlx", shipped)
    assert code == 0 and answer["survey"]["legal_cuts"] == list(range(1, layers))


@pytest.mark.extended
def test_what_cannot_be_read_cannot_be_run(tmp_path: Path) -> None:
    code, answer = ask("mlx", tmp_path)
    assert code == 0 and tmp_path.name in answer["unable"]


def test_an_engine_without_opinion_says_so(tmp_path: Path) -> None:
    assert isinstance(provider("mlx"), Surveyor) and not isinstance(provider("dummy"), Surveyor)
    code, answer = ask("dummy", tmp_path)
    assert code == 1 and "at any layer" in str(answer["error"])

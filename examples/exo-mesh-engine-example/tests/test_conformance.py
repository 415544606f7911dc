"""The example engine does what every engine must."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from exo_mesh_engine_example.model import MIX, write_random_model

from exo_mesh.engine.conformance import *  # noqa: F403 - the tests
from exo_mesh.engine.conformance import Damage, Subject
from exo_mesh.weights.random_checkpoint import write_json, write_safetensors


def _without_layers(directory: Path) -> None:
    write_safetensors(
        directory / "model.safetensors", {"surplus": (3,)}, "float32", lambda name: np.ones(3, np.float32)
    )


def _other_hidden_size(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_bytes())
    write_json(directory / "config.json", {**config, "hidden_size": 31})


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(
        "exo_mesh_engine_example:provider",
        write_model=write_random_model,
        damages=(
            Damage("tensors are missing", _without_layers, ("model.safetensors", MIX.format(0))),
            Damage("shapes disagree with the config", _other_hidden_size, ("model.safetensors", MIX.format(0))),
            Damage("there is no config", lambda path: (path / "config.json").unlink(), ("config.json",)),
        ),
    )

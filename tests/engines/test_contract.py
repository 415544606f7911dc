"""Every engine that can run on this machine does what the contract says: ours, and any that somebody installed here."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from exo_mesh.engine.conformance import *  # noqa: F403 - the tests
from exo_mesh.engine.conformance import Damage, Subject
from exo_mesh.engine.conformance.subject import TINY
from exo_mesh.engine.registry import GROUP
from exo_mesh.weights.random_checkpoint import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]

BF16_TOLERANCE = 0.1
"""What a batch may move bfloat16 logits by, relative to their rms: a rounding of 2^-9 in each of some ten steps."""

F16_TOLERANCE = 0.01
"""The same for keys and values in float16."""


def _break_json(name: str) -> Damage:
    return Damage(f"{name} is not JSON", lambda path: _write(path / name), (name,))


def _write(file: Path) -> None:
    file.write_text("{")


def write_bfloat16(directory: Path) -> Path:
    """The tiny Llama in bfloat16."""
    return write_checkpoint(directory, type(TINY)("llama", layers=TINY.layers, dtype="bfloat16"))


def ours(name: str, path: str) -> Sequence[Subject]:
    """How an engine of this repository is looked at, the quick way first; others as they come."""
    variants: Mapping[str, Sequence[Subject]] = {
        "dummy": [
            Subject(path, reads_weights=False, damages=(_break_json("config.json"), _break_json("tokenizer.json")))
        ],
        "mlx": [Subject(path), Subject(path, write_model=write_bfloat16, tolerance=BF16_TOLERANCE, damages=())],
        "torch": [  # one thread: on so small a model the others would only wait for each other
            Subject(path, {"dtype": "float32", "threads": "1"}),
            Subject(
                path,
                {"dtype": "bfloat16", "threads": "1"},
                tolerance=BF16_TOLERANCE,
                damages=(),
            ),
        ],
        "llamacpp": [
            Subject(path, {"kv": "f32", "threads": "1"}),
            Subject(path, {"kv": "f16", "unified": "on", "threads": "1"}, tolerance=F16_TOLERANCE, damages=()),
            Subject(path, {"kv": "f16", "flash": "on", "threads": "1"}, tolerance=F16_TOLERANCE, damages=()),
        ],
        "numpy": [Subject(path), Subject(path, {"mode": "deterministic"}, damages=())],
    }
    return variants.get(name, [Subject(path)])


def installed() -> dict[str, str]:
    """{name: "package:attribute"} of stage engines: what this tree declares, and what is installed besides."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    found = {point.name: point.value for point in entry_points(group=GROUP)}
    stages = {**found, **declared}
    return {name: path for name, path in stages.items() if Subject(path).load_provider().kind == "stage"}


SUBJECTS = [
    pytest.param(subject, id=name if index == 0 else f"{name}-{index}", marks=[pytest.mark.slow] * (index > 0))
    for name, path in sorted(installed().items())
    for index, subject in enumerate(ours(name, path))
]


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Subject:
    found: Subject = request.param
    return found

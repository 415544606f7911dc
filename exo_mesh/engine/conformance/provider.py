"""Checks what a provider reports before its engine is loaded, and what asking it may cost."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from exo_mesh.engine.conformance.stages import CutModel
from exo_mesh.engine.conformance.subject import Subject
from exo_mesh.engine.contract import Compute, EngineProvider, Surveyor
from exo_mesh.weights.card import read_card

__all__ = [
    "test_a_survey_fits_the_model",
    "test_asking_the_provider_imports_no_heavy_library",
    "test_the_provider_describes_itself",
    "test_what_is_surveyed_is_what_is_held",
]

HEAVY = ("jax", "llama_cpp", "mlx", "mlx_lm", "onnxruntime", "tensorflow", "tinygrad", "torch", "transformers")
"""Libraries that take a second to import, or memory, or a device; a node asks every engine when it starts."""

_ASK = """
import importlib, sys
module, _, attribute = sys.argv[1].partition(":")
provider = getattr(importlib.import_module(module), attribute)
provider.name, provider.kind, provider.availability(), provider.version()
provider.supports("llama"), provider.supports("no_such_architecture")
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_the_provider_describes_itself(engine_provider: EngineProvider, model: CutModel) -> None:
    look = engine_provider.availability()
    assert engine_provider.kind == "stage"
    assert engine_provider.name.strip() == engine_provider.name != ""
    assert look.available and look.reason
    assert look.compute in get_args(Compute)
    assert engine_provider.version()
    assert engine_provider.supports(read_card(model.directory, "subject").architecture)


def test_asking_the_provider_imports_no_heavy_library(subject: Subject) -> None:
    command = [sys.executable, "-c", _ASK, subject.provider]
    asked = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert not set(asked.stdout.split()) & set(HEAVY)


def test_a_survey_fits_the_model(subject: Subject, engine_provider: EngineProvider, model: CutModel) -> None:
    if not isinstance(engine_provider, Surveyor):
        pytest.skip("the provider has no survey: every boundary is legal, and bytes are those of the files")
    survey = engine_provider.survey(model.directory, subject.options)
    assert list(survey.legal_cuts) == sorted(set(survey.legal_cuts))
    assert all(0 < cut < model.num_layers for cut in survey.legal_cuts)
    assert survey.legal_cuts or survey.reason
    per_layer = (survey.layer_bytes, survey.kv_bytes_per_token, survey.kv_fixed_bytes, survey.layer_kinds)
    assert all(len(values) in (0, model.num_layers) for values in per_layer)
    assert min((*survey.layer_bytes, *survey.kv_bytes_per_token, *survey.kv_fixed_bytes), default=0) >= 0


def test_what_is_surveyed_is_what_is_held(subject: Subject, engine_provider: EngineProvider, model: CutModel) -> None:
    survey = engine_provider.survey(model.directory, subject.options) if isinstance(engine_provider, Surveyor) else None
    if survey is None or not survey.layer_bytes:
        pytest.skip("the survey has no bytes")
    before = held_before(engine_provider)
    engine = model.stage(0, model.num_layers)
    stated = sum(survey.layer_bytes) + survey.embed_bytes + survey.head_bytes
    held = engine.memory_bytes() - before
    engine.close()
    assert abs(held - stated) <= 0.15 * stated + 65536, f"the survey says {stated} bytes, but {held} are held"


def held_before(provider: EngineProvider) -> int:
    """The bytes that an engine counts before it holds anything: libraries count for the whole process, which has other
    stages too."""
    try:
        return provider.create().memory_bytes()
    except Exception:  # noqa: BLE001 - the contract promises an answer only for a loaded stage
        return 0

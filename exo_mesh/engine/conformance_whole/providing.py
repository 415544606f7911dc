"""Checks what a provider reports before its engine is loaded, and what asking it may cost."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

from exo_mesh.domain.whole.served import SERVED_ARCHITECTURE
from exo_mesh.engine.conformance_whole.subject import WholeSubject
from exo_mesh.engine.contract import Compute

__all__ = ["test_asking_the_provider_imports_no_heavy_library", "test_the_provider_says_that_it_takes_whole_models"]

_HEAVY = {"jax", "llama_cpp", "mlx", "mlx_lm", "onnxruntime", "tensorflow", "torch", "transformers", "xllamacpp"}

_ASK = """
import importlib, sys
module, _, attribute = sys.argv[1].partition(":")
provider = getattr(importlib.import_module(module), attribute)
provider.name, provider.kind, provider.availability(), provider.version(), provider.supports("llama"), provider.look
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_the_provider_says_that_it_takes_whole_models(whole_subject: WholeSubject) -> None:
    provider = whole_subject.load_provider()
    availability = provider.availability()
    assert provider.kind == "whole-model"
    assert provider.name.strip() == provider.name != ""
    assert availability.reason
    assert availability.compute in get_args(Compute)
    assert provider.version()
    assert provider.supports(SERVED_ARCHITECTURE)
    assert not provider.supports("llama"), "models in files belong to the engines that read files"


def test_asking_the_provider_imports_no_heavy_library(whole_subject: WholeSubject) -> None:
    command = [sys.executable, "-c", _ASK, whole_subject.provider]
    asked = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert not set(asked.stdout.split()) & _HEAVY

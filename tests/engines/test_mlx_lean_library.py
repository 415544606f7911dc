"""A runner imports mlx-lm without tokenizers and downloads, and all names of mlx-lm keep working."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("mlx_lm")

CREATE = """
import sys
from exo_mesh.engine.registry import provider
engine = provider("mlx").create()
unwanted = {"torch", "transformers", "tokenizers", "huggingface_hub", "mlx_lm.tokenizer_utils"} & sys.modules.keys()
"""


def output_of(code: str) -> str:
    """What this code prints in a process of its own after the engine was made."""
    command = [sys.executable, "-c", CREATE + code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


def test_the_engine_is_made_without_the_libraries_of_tokenizers_and_downloads() -> None:
    code = "import mlx_lm.utils, mlx_lm.models.llama; print(unwanted, callable(mlx_lm.utils.load_model))"
    assert output_of(code).split() == ["set()", "True"]


def test_a_name_that_the_library_lacks_is_an_error_as_ever() -> None:
    assert output_of("""
import mlx_lm
print(hasattr(mlx_lm, "__wrapped__"), "transformers" in sys.modules)
""").split() == ["False", "False"]


@pytest.mark.extended
def test_what_was_left_out_is_imported_at_its_first_use() -> None:
    assert output_of("""
import mlx_lm, mlx_lm.utils
try:
    mlx_lm.utils.load("/nowhere/at/all")
except Exception as exc:
    print(type(exc).__module__.partition(".")[0])  # by huggingface_hub, which refuses the name
print(mlx_lm.__version__ == __import__("importlib.metadata").metadata.version("mlx-lm"))
print(mlx_lm.generate.__name__, hasattr(mlx_lm, "nothing"))
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.generate import generate_step
print(TokenizerWrapper.__module__, generate_step.__module__)
""").split() == ["huggingface_hub", "True", "generate", "False", "mlx_lm.tokenizer_utils", "mlx_lm.generate"]

"""Engines that compute in float32 agree on a real model: from its GGUF file and from a copy of its values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from exo_mesh.engine.contract import StageEngine
from tests.engines.serving_ways import LIBRARIES
from tests.real.real_model import PROMPTS, load_ring, prompt_ids
from tests.support.exactness import assert_within_margin
from tests.support.serving import ServingRing

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

OPTIONS = {"torch": {"dtype": "float32", "threads": "1"}, "llamacpp": {"threads": "1", "kv": "f32"}}
CUTS = ((), (15,), (10, 20))
OF_THE_FILE = ("numpy-numpy",)
OF_THE_COPY = ("torch", "llamacpp-numpy")
"""The engines of the stages, in their order."""

MORE_OF_THE_FILE = ("numpy", "numpy-numpy-numpy", "torch", "torch-numpy", "torch-torch-torch")
MORE_OF_THE_COPY = (
    "mlx", "mlx-mlx", "numpy", "llamacpp", "torch-torch", "numpy-llamacpp-mlx", "mlx-torch-llamacpp",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(model_dir: Path) -> Iterator[StageEngine]:
    """The NumPy engine with all layers of the file."""
    (stage,) = load_ring(model_dir, ["numpy"], (), OPTIONS)
    yield stage
    stage.close()


def check(model_dir: Path, name: str, whole: StageEngine, tokenizer: Tokenizer) -> None:
    """Prompts, all at once, over stages of these engines: each token is the likeliest within the margin."""
    parts = name.split("-")
    for engine in set(parts) & set(LIBRARIES):
        for library in LIBRARIES[engine]:
            pytest.importorskip(library)
    stages = load_ring(model_dir, parts, CUTS[len(parts) - 1], OPTIONS)
    ring = ServingRing(stages)
    asked = [ring.submit(prompt_ids(tokenizer, question), 6) for question in PROMPTS[::100]]
    ring.run()
    for stage in stages:
        stage.close()
    for one in asked:
        assert not one.answers.error and len(one.answers.tokens) == 6
        assert_within_margin(whole, one, "float32")


def rings(some: tuple[str, ...], more: tuple[str, ...]) -> list[object]:
    return [*some, *(pytest.param(name, marks=pytest.mark.slow) for name in more)]


@pytest.mark.parametrize("name", rings(OF_THE_FILE, MORE_OF_THE_FILE))
def test_stages_of_the_file_agree(model_dir: Path, name: str, whole: StageEngine, tokenizer: Tokenizer) -> None:
    check(model_dir, name, whole, tokenizer)


@pytest.mark.parametrize("name", rings(OF_THE_COPY, MORE_OF_THE_COPY))
def test_stages_of_the_copy_agree(float_copy: Path, name: str, whole: StageEngine, tokenizer: Tokenizer) -> None:
    check(float_copy, name, whole, tokenizer)

"""The engines as they serve, with a small model whose logits are flat, and what each request gets when it is alone."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from exo_mesh.engine.contract import StageEngine
from exo_mesh.weights.random_checkpoint import TinyModel, write_checkpoint
from tests.support.exactness import assert_same_bits, assert_within_margin
from tests.support.serving import Asked, ServingRing, Tokens, load_stages

FLAT = TinyModel("llama", layers=4, hidden=32, intermediate=64)
VOCAB = 64
"""Prompts have token ids below this."""
SIZES = (3, 17, 1, 64, 9, 40, 2, 33, 5, 100)
"""Tokens of the prompts, over and over."""

LIBRARIES = {"mlx": ("mlx", "mlx_lm"), "torch": ("torch", "transformers"), "llamacpp": ("xllamacpp",)}
"""What an engine needs that exo-mesh does not install everywhere."""


@dataclass(frozen=True)
class Way:
    """An engine and its options. dtype: computed in, if equal bits are not to be had; else "". architecture: of the
    model, by the name that the engine's library has for it."""

    engine: str
    options: dict[str, str] = field(default_factory=dict)
    dtype: str = ""
    architecture: str = "llama"

    @property
    def name(self) -> str:
        return "-".join([self.engine, *self.options.values(), self.architecture])

    @property
    def is_installed(self) -> bool:
        return all(importlib.util.find_spec(library) is not None for library in LIBRARIES.get(self.engine, ()))


DUMMY = Way("dummy")
DETERMINISTIC = Way("numpy", {"mode": "deterministic"})
FAST = Way("numpy", {"mode": "fast"}, "float32")
MLX = Way("mlx", {"batch_attention": "off"})
MLX_IN_BLOCKS = Way("mlx", {}, "float32")
TORCH = Way("torch", {"dtype": "float32", "threads": "1"}, "float32")
LLAMACPP = Way("llamacpp", {"threads": "1", "kv": "f32"}, "float32")
TORCH_BF16 = Way("torch", {"dtype": "bfloat16", "threads": "1"}, "bfloat16")


class Bench:
    """A model in one way: its stages by how it is cut, each loaded once, and requests of `tokens` tokens alone."""

    def __init__(self, way: Way, model_dir: Path, prompts: Sequence[Tokens], tokens: int) -> None:
        self.way, self.prompts, self.tokens = way, prompts, tokens
        self._model_dir = model_dir
        self._stages: dict[tuple[int, ...], list[StageEngine]] = {}
        self._alone: dict[Tokens, Asked] = {}

    @property
    def whole(self) -> StageEngine:
        return self.stages(())[0]

    def stages(self, cuts: tuple[int, ...]) -> list[StageEngine]:
        if cuts not in self._stages:
            self._stages[cuts] = load_stages(self.way.engine, self._model_dir, cuts, self.way.options)
        return self._stages[cuts]

    def alone(self, prompt: Tokens) -> Asked:
        """The request in one piece, with nobody else on the ring."""
        if prompt not in self._alone:
            ring = ServingRing([self.whole])
            asked = self._alone[prompt] = ring.submit(prompt, self.tokens)
            while ring.num_in_flight:
                ring.run()
                ring.read(asked)
        return self._alone[prompt]

    def check(self, asked: Asked) -> None:
        """What has come so far is what the request gets alone, in the tier of exactness that the engine has."""
        if self.way.dtype:
            assert_within_margin(self.whole, asked, self.way.dtype)
        else:
            assert_same_bits(asked, self.alone(asked.request.prompt_ids))

    def close(self) -> None:
        for stages in self._stages.values():
            for stage in stages:
                stage.close()


def flat_model(directory: Path) -> Path:
    return write_checkpoint(directory, FLAT)


def write_model(way: Way, directory: Path) -> Path:
    """A small random model of its architecture, with a vocabulary of at least VOCAB."""
    if way.architecture == "llama":
        return flat_model(directory)
    if way.engine == "mlx":
        from tools.architectures.mlx_configs import tiny_config
        from tools.architectures.mlx_models import write_checkpoint as write_mlx

        return write_mlx(directory, tiny_config(way.architecture))
    if way.engine == "llamacpp":
        return _write_gguf(way.architecture, directory)
    from tools.architectures.torch_models import write_random_model

    return write_random_model(directory, way.architecture)


def _write_gguf(architecture: str, directory: Path) -> Path:
    """A model of an architecture of llama.cpp. The config says only how many layers it has."""
    from exo_mesh_llamacpp.library import open_library
    from exo_mesh_llamacpp.library_file import packaged_library

    from tools.architectures.llamacpp_configs import ON_DEMAND, metadata_of
    from tools.architectures.llamacpp_shapes import ask_shapes
    from tools.architectures.llamacpp_shapes import write_model as write_random_gguf

    library = open_library(packaged_library())
    asked = ask_shapes(library, metadata_of(architecture, False), ON_DEMAND)
    write_random_gguf(library, asked, directory)
    num_layers = asked.metadata[f"{architecture}.block_count"]
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": num_layers}))
    return directory


def prompts(count: int, sizes: Sequence[int] = SIZES) -> list[Tokens]:
    """Different ones, of so many tokens in turns."""
    rng = np.random.default_rng(5)
    return [tuple(rng.integers(3, VOCAB, sizes[number % len(sizes)]).tolist()) for number in range(count)]

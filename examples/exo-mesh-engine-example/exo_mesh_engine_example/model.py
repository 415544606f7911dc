"""The format of the model, all in float32: `embed_tokens.weight` and `lm_head.weight` `[vocab, hidden]`, and
`layers.N.mix.weight` `[hidden, hidden]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from exo_mesh.errors import ModelError
from exo_mesh.weights.card import read_json
from exo_mesh.weights.random_checkpoint import TinyModel, tokenizer_json, write_json, write_safetensors
from exo_mesh.weights.safetensors import read_tensor_table
from exo_mesh_engine_example.provider import ARCHITECTURE

EMBED, HEAD, MIX = "embed_tokens.weight", "lm_head.weight", "layers.{}.mix.weight"


class BigramFiles:
    """A model directory, opened: sizes from config.json, tensors from the safetensors headers, no weight read yet.

    Raises ModelError that names the file, and the tensor or key.
    """

    def __init__(self, directory: Path) -> None:
        file = directory / "config.json"
        config = read_json(file)
        if config.get("model_type") != ARCHITECTURE:
            raise ModelError(f"{file}: this engine runs {ARCHITECTURE}, not {config.get('model_type')!r}")
        self.directory = directory
        self.vocab_size, self.hidden_size, self.num_layers = (
            _size(file, config, key) for key in ("vocab_size", "hidden_size", "num_hidden_layers")
        )
        self._table = read_tensor_table(directory)

    def read(self, name: str) -> np.ndarray:
        """One tensor, float32, in memory of its own."""
        hidden = self.hidden_size
        shape = (self.vocab_size, hidden) if name in (EMBED, HEAD) else (hidden, hidden)
        info = self._table.get(name)
        if info is None:
            raise ModelError(f"{self.directory / 'model.safetensors'} has no tensor {name}")
        if (info.dtype, info.shape) != ("F32", shape):
            raise ModelError(f"{info.file}: {name} is {info.dtype}{list(info.shape)}, expected F32{list(shape)}")
        return np.fromfile(info.file, np.float32, count=int(np.prod(shape)), offset=info.start).reshape(shape)


def write_random_model(directory: Path, *, layers: int = 4, hidden: int = 32, seed: int = 0) -> Path:
    """A model of random weights with a tokenizer of bytes; answers `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    sizes = TinyModel(layers=layers, hidden=hidden, heads=1, kv_heads=1, vocab=300)
    config = {
        "model_type": ARCHITECTURE,
        "vocab_size": sizes.vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "max_position_embeddings": 4096,
        "eos_token_id": sizes.vocab - 1,
    }
    write_json(directory / "config.json", config)
    write_json(directory / "tokenizer.json", tokenizer_json(sizes))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    write_json(directory / "tokenizer_config.json", {"eos_token": "<|end|>", "chat_template": template})
    shapes = {EMBED: (sizes.vocab, hidden), HEAD: (sizes.vocab, hidden)}
    shapes |= {MIX.format(layer): (hidden, hidden) for layer in range(layers)}
    rng = np.random.default_rng(seed)
    scaled = {name: 3 * rng.standard_normal(shape, np.float32) / hidden**0.5 for name, shape in shapes.items()}
    write_safetensors(directory / "model.safetensors", shapes, "float32", scaled.__getitem__)
    return directory


def _size(file: Path, config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{file} has no usable {key}: {value!r}")
    return value

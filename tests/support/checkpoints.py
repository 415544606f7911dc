"""Random checkpoints for tests: see exo_mesh.weights.random_checkpoint, which programs use as well."""

from exo_mesh.weights.random_checkpoint import (
    TinyModel,
    byte_alphabet,
    config_json,
    tensor_shapes,
    tokenizer_json,
    write_checkpoint,
    write_json,
    write_safetensors,
)

__all__ = [
    "TinyModel",
    "byte_alphabet",
    "config_json",
    "tensor_shapes",
    "tokenizer_json",
    "write_checkpoint",
    "write_json",
    "write_safetensors",
]

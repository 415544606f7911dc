"""Random checkpoints for tests: see exo_mesh.weights.random_checkpoint, which programs use as well."""

import math

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
    "num_parameters",
    "tensor_shapes",
    "tokenizer_json",
    "write_checkpoint",
    "write_json",
    "write_safetensors",
]


def num_parameters(model: TinyModel) -> int:
    """How many parameters all tensors of the model have."""
    return sum(math.prod(shape) for shape in tensor_shapes(model).values())

"""Writes a random Llama as a GGUF file of one type, without quantising anything: blocks of repeated random bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from exo_mesh_llamacpp.container import Metadata, lay_out
from exo_mesh_llamacpp.types import F32, GgmlType

from exo_mesh.weights.random_checkpoint import TinyModel

CHUNK_BYTES = 2**24
SCALE = np.float16(0.002)
"""Factor of each block, so that activations stay finite."""


def write_random_gguf(file: Path, model: TinyModel, kind: GgmlType) -> int:
    """Write a model whose matrices have type `kind` (q4_0 or q8_0: blocks that begin with their factor in float16);
    returns the bytes of the file."""
    norm, shapes = (model.hidden,), matrices(model)
    tensors = [(name, kind, shape) for name, shape in shapes.items()]
    tensors += [
        (f"blk.{index}.{name}.weight", F32, norm) for index in range(model.layers) for name in ("attn_norm", "ffn_norm")
    ]
    tensors.append(("output_norm.weight", F32, norm))
    head, placed, size = lay_out(_metadata(model), tensors)
    block = np.random.default_rng(3).integers(0, 256, (CHUNK_BYTES // kind.block_bytes, kind.block_bytes), np.uint8)
    block[:, :2] = np.frombuffer(SCALE.tobytes(), np.uint8)
    noise, ones = block.tobytes(), np.ones(model.hidden, np.float32).tobytes()
    with file.open("wb") as stream:
        stream.write(head)
        for place in placed:
            stream.seek(place.start)
            if place.kind is F32:
                stream.write(ones)
                continue
            for begin in range(0, place.num_bytes, len(noise)):
                stream.write(noise[: min(len(noise), place.num_bytes - begin)])
        stream.truncate(size)
    return size


def matrices(model: TinyModel) -> dict[str, tuple[int, ...]]:
    """The shapes of all matrices, the length of a row first."""
    hidden, kv_width, wide = model.hidden, model.kv_heads * model.head_dim, model.intermediate
    of_layer = {
        "attn_q": (hidden, hidden),
        "attn_k": (hidden, kv_width),
        "attn_v": (hidden, kv_width),
        "attn_output": (hidden, hidden),
        "ffn_gate": (hidden, wide),
        "ffn_up": (hidden, wide),
        "ffn_down": (wide, hidden),
    }
    ends = ("token_embd.weight", "output.weight")
    found: dict[str, tuple[int, ...]] = dict.fromkeys(ends, (hidden, model.vocab))
    for index in range(model.layers):
        found |= {f"blk.{index}.{name}.weight": shape for name, shape in of_layer.items()}
    return found


def _metadata(model: TinyModel) -> Metadata:
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "none",
        "llama.block_count": model.layers,
        "llama.context_length": model.context,
        "llama.embedding_length": model.hidden,
        "llama.feed_forward_length": model.intermediate,
        "llama.attention.head_count": model.heads,
        "llama.attention.head_count_kv": model.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": model.head_dim,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": model.vocab,
    }

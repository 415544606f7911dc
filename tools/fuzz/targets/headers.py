"""Weight files that lie: GGUF and safetensors with mutated headers, huge counts, absurd shapes, and NaN weights."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gguf_bytes import ARRAY, F32, TEXT, U32, RawTensor, gguf_bytes, value
from tools.fuzz.models import Edit, ask_all, edit_json, hostile_models
from tools.fuzz.mutate import mutated
from tools.fuzz.rig import Rig

COUNT, NUM_NODES, CLOSED = 10, 1, False
FLAGS = ("--discovery", "none", "--models-dir", "DIRECTORY/models", "--engine", "numpy")
MAX_NODE_SHARE = 1.5
WEIGHTS = "model.safetensors"
HUGE = (2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1, 10**4000)


def _parts(model: Path) -> tuple[dict[str, Any], bytes]:
    content = (model / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _write(model: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    said = len(header) if length is None else length
    (model / WEIGHTS).write_bytes(struct.pack("<Q", min(said, 2**64 - 1)) + header + data)


def mutated_safetensors(rng: random.Random, model: Path) -> None:
    header, data = _parts(model)
    _write(model, mutated(rng, json.dumps(header).encode()), data)


def claimed_length(rng: random.Random, model: Path) -> None:
    header, data = _parts(model)
    _write(model, json.dumps(header).encode(), data, rng.choice(HUGE))


def overlapping(rng: random.Random, model: Path) -> None:
    header, data = _parts(model)
    for entry in rng.sample(list(header.values()), 5):
        if "data_offsets" in entry:
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            start = rng.choice((0, 1, -size, len(data) - size + 1, 2**62))
            entry["data_offsets"] = [start, start + size]
    _write(model, json.dumps(header).encode(), data)


def absurd_shapes(rng: random.Random, model: Path) -> None:
    header, data = _parts(model)
    for entry in header.values():
        if "shape" in entry and rng.random() < 0.3:
            entry["shape"] = rng.choice(([rng.choice(HUGE)], [-1, 5], [0] * 40, [2**32, 2**32], [1] * 5000, "x", [1.5]))
    _write(model, json.dumps(header).encode(), data)


def many_tensors(rng: random.Random, model: Path) -> None:
    header, data = _parts(model)
    number = rng.choice((1000, 200_000))
    header |= {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(number)}
    _write(model, json.dumps(header).encode(), data)


def nan_weights(rng: random.Random, model: Path) -> None:
    header, data = _parts(model)
    values = np.frombuffer(data, np.float32).copy()
    bad = rng.choice((float("nan"), float("inf"), -float("inf"), 3e38))
    step = rng.choice((1, 7, len(values) - 1))
    values[::step] = bad
    _write(model, json.dumps(header).encode(), values.tobytes())


def wide_config(rng: random.Random, model: Path) -> None:
    names = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "max_position_embeddings",
             "intermediate_size", "head_dim", "num_key_value_heads")  # fmt: skip
    wrong = {name: rng.choice((*HUGE[:6], 0, -1, 1.5, "9", None, [1])) for name in rng.sample(names, 2)}
    edit_json(model / "config.json", lambda d: d.update(wrong))


def _gguf(rng: random.Random, model: Path, num_tensors: int | None = None, num_entries: int | None = None) -> bytes:
    for file in model.iterdir():
        file.unlink()
    words = [f"w{i}" for i in range(300)]
    entries = {
        "general.architecture": value(TEXT, "llama"), "llama.block_count": value(U32, 2),
        "llama.context_length": value(U32, rng.choice((256, 2**32 - 1))), "llama.embedding_length": value(U32, 32),
        "llama.feed_forward_length": value(U32, 64), "llama.attention.head_count": value(U32, 4),
        "llama.attention.layer_norm_rms_epsilon": value(F32, 1e-5), "tokenizer.ggml.model": value(TEXT, "gpt2"),
        "tokenizer.ggml.tokens": value(ARRAY, (TEXT, words)), "tokenizer.ggml.merges": value(ARRAY, (TEXT, [])),
    }  # fmt: skip
    tensors = [RawTensor("token_embd.weight", (32, 300), 0, bytes(4 * 32 * 300))]
    return gguf_bytes(entries, tensors, num_tensors=num_tensors, num_entries=num_entries)


def mutated_gguf(rng: random.Random, model: Path) -> None:
    content = _gguf(rng, model)
    (model / "model.gguf").write_bytes(mutated(rng, content[:9000]) + content[9000:])


def counts_gguf(rng: random.Random, model: Path) -> None:
    wrong = {rng.choice(("num_tensors", "num_entries")): rng.choice(HUGE[:6])}
    (model / "model.gguf").write_bytes(_gguf(rng, model, **wrong))


EDITS: dict[str, Edit] = {
    "mutated": mutated_safetensors, "length": claimed_length, "overlapping": overlapping, "shapes": absurd_shapes,
    "many": many_tensors, "nan": nan_weights, "config": wide_config, "gguf": mutated_gguf, "counts": counts_gguf,
}  # fmt: skip


def prepared(directory: Path, seed: int, numbers: Sequence[int]) -> AbstractContextManager[dict[str, str]]:
    return hostile_models(directory, seed, numbers, EDITS)


def body(_: str, rng: random.Random) -> dict[str, Any]:
    """Returns a chat that draws tokens, some with their log-probabilities."""
    extra = rng.choice(
        ({}, {"temperature": 0}, {"logprobs": True, "top_logprobs": 2}, {"temperature": 2.0, "top_p": 0.9})
    )
    return {"messages": [{"role": "user", "content": "Count from 7 to 9."}], **extra}


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Asks for each model once."""
    return Counter(await ask_all(rig, body))

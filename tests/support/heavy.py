"""Tests that write a checkpoint of gigabytes: how large it is, and whether this machine has the memory for it now.

The size is the largest of those that a test offers for which there is memory, or what TEST_MODEL_GB says. If there is
memory for none, the test is skipped and says the numbers; PREFLIGHT_FORCE=1 runs it all the same. (The names have no
EXO_MESH_ in front: a node refuses variables of that kind that it does not know.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tests.support.checkpoints import TinyModel, num_parameters
from tools.preflight import Reading, is_forced, read, refusal

MODEL_GB = "TEST_MODEL_GB"
SIZES = (1_550_000_000, 1_000_000_000)
"""Bytes of a checkpoint, the preferred size first. Below the second, a single tensor is more than the 15 % of a stage
that loading may take on top of it."""

_WIDE = TinyModel(layers=8, hidden=2048, heads=16, kv_heads=8, intermediate=0, vocab=32000, dtype="bfloat16", shards=4)


def checkpoint_bytes(memory_per_byte: float, sizes: Sequence[int] = SIZES) -> int:
    """How many bytes of checkpoint to write. memory_per_byte: memory that the test needs for each of them, at most.

    Skips the test if there is no memory for it.
    """
    size, reason = choose(memory_per_byte, sizes, read(), os.environ)
    if reason:
        pytest.skip(reason)
    return size


def choose(
    memory_per_byte: float, sizes: Sequence[int], reading: Reading, environ: Mapping[str, str]
) -> tuple[int, str]:
    """(bytes of the checkpoint, "" or why the test cannot run). Pure. Raises ValueError if TEST_MODEL_GB is no size."""
    if text := environ.get(MODEL_GB, ""):
        sizes = (round(float(text) * 1e9),)
        if sizes[0] <= 0:
            raise ValueError(f"{MODEL_GB}={text} is no size")
    if is_forced(environ):
        return sizes[0], ""
    reasons = [refusal(reading, round(memory_per_byte * size)) for size in sizes]
    for size, reason in zip(sizes, reasons, strict=True):
        if not reason:
            return size, ""
    return 0, f"a checkpoint of {sizes[-1] / 1e9:.2f} GB: {reasons[-1]}"


def eight_layers(size_bytes: int) -> TinyModel:
    """A model of eight layers, two bytes a weight, in four files of about so many bytes together."""
    fixed, step = num_parameters(_WIDE), num_parameters(replace(_WIDE, intermediate=1)) - num_parameters(_WIDE)
    width = (size_bytes // 2 - fixed) // step // 64 * 64
    if width < 64:
        raise ValueError(f"{size_bytes} bytes are too few: embedding, head and attention take {2 * fixed}")
    return replace(_WIDE, intermediate=width)

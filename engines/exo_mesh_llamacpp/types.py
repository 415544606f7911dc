"""The types of ggml's tensors: number, and the bytes of a block of values. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class GgmlType(msgspec.Struct, frozen=True):
    """A type of tensor elements. block: values that are packed together, into block_bytes."""

    name: str
    number: int
    block: int
    block_bytes: int

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` values, which must be a multiple of the block."""
        return width // self.block * self.block_bytes

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor. shape: as ggml has it, the length of a row first."""
        return self.row_bytes(shape[0]) * math.prod(shape[1:])


F32 = GgmlType("f32", 0, 1, 4)
F16 = GgmlType("f16", 1, 1, 2)
BF16 = GgmlType("bf16", 30, 1, 2)
Q4_0 = GgmlType("q4_0", 2, 32, 18)
Q8_0 = GgmlType("q8_0", 8, 32, 34)
Q4_K = GgmlType("q4_k", 12, 256, 144)
Q6_K = GgmlType("q6_k", 14, 256, 210)
IQ1_S = GgmlType("iq1_s", 19, 256, 50)

QUANTS = {kind.name: kind for kind in (F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q6_K)}
"""Types that matrices can be converted to while a checkpoint is loaded."""

KV_TYPES = {kind.name: kind for kind in (F16, F32, Q8_0, Q4_0)}
"""Types of keys and values."""

KNOWN = {
    kind.number: kind
    for kind in (
        *QUANTS.values(),
        GgmlType("q4_1", 3, 32, 20),
        GgmlType("q5_0", 6, 32, 22),
        GgmlType("q5_1", 7, 32, 24),
        GgmlType("q2_k", 10, 256, 84),
        GgmlType("q3_k", 11, 256, 110),
        GgmlType("q5_k", 13, 256, 176),
        GgmlType("iq2_xxs", 16, 256, 66),
        GgmlType("iq2_xs", 17, 256, 74),
        GgmlType("iq3_xxs", 18, 256, 98),
        IQ1_S,
        GgmlType("iq4_nl", 20, 32, 18),
        GgmlType("iq3_s", 21, 256, 110),
        GgmlType("iq2_s", 22, 256, 82),
        GgmlType("iq4_xs", 23, 256, 136),
        GgmlType("iq1_m", 29, 256, 56),
        GgmlType("tq1_0", 34, 256, 54),
        GgmlType("tq2_0", 35, 256, 66),
        GgmlType("mxfp4", 39, 32, 17),
    )
}
"""By number: the types that a GGUF file may have and that this engine passes on as they are."""


def fitting(wanted: GgmlType, width: int) -> GgmlType:
    """The type for rows of `width` values: the wanted type if its blocks fill a row, otherwise a wider type that
    does."""
    for kind in (wanted, Q8_0, F16):
        if kind.block_bytes * wanted.block >= wanted.block_bytes * kind.block and width % kind.block == 0:
            return kind
    return F32

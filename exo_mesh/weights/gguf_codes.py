"""Takes the quantised blocks of GGUF files apart, into codes and their factors. Pure.

Only types whose values are `scale * code + bias` per group of 32, with codes of 4 or 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from exo_mesh.weights.gguf_blocks import factors_k, float16, nibbles

GROUP_SIZE = 32

Parts = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Codes uint8 `[blocks, elements of a block]`; scales and biases float32 `[blocks, groups of a block]`."""


class CodedType(msgspec.Struct, frozen=True):
    """bits: of a code. take_apart: of uint8 `[blocks, bytes of a block]`."""

    bits: int
    take_apart: Callable[[np.ndarray], Parts]


def _q4_0(blocks: np.ndarray) -> Parts:
    scales = float16(blocks, 0)
    return nibbles(blocks[:, 2:], 1).reshape(len(blocks), 32), scales, -8 * scales


def _q4_1(blocks: np.ndarray) -> Parts:
    return nibbles(blocks[:, 4:], 1).reshape(len(blocks), 32), float16(blocks, 0), float16(blocks, 2)


def _q8_0(blocks: np.ndarray) -> Parts:
    scales = float16(blocks, 0)
    return blocks[:, 2:] ^ 0x80, scales, -128 * scales


def _q4_k(blocks: np.ndarray) -> Parts:
    scales, minima = factors_k(blocks)
    return nibbles(blocks[:, 16:], 4).reshape(len(blocks), 256), scales[..., 0], -minima[..., 0]


CODED: Mapping[str, CodedType] = {
    "Q4_0": CodedType(4, _q4_0),
    "Q4_1": CodedType(4, _q4_1),
    "Q4_K": CodedType(4, _q4_k),
    "Q8_0": CodedType(8, _q8_0),
}
"""{type of a tensor: how it is taken apart}."""

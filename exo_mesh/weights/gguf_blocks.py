"""Converts the quantised blocks of GGUF files to float32: the very bits of ggml's own conversion.

A block has one or two float16 factors and small integers. Blocks of 256 (`_K`) have integer factors for each part of
16 or 32 as well. The order of products and sums is ggml's; another one would give other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Convert = Callable[[np.ndarray, np.ndarray], None]
"""uint8 `[blocks, bytes of a block]` into float32 `out`, C-contiguous `[blocks, elements of a block]`."""


def dequantise(dtype: str, blocks: np.ndarray, out: np.ndarray) -> None:
    """See Convert. dtype: one of READABLE. Changes `out` only."""
    with np.errstate(invalid="ignore", over="ignore"):  # factors of a damaged file may be infinite
        READABLE[dtype](blocks, out)


def float16(blocks: np.ndarray, first: int) -> np.ndarray:
    """float32 `[blocks, 1]` of the float16 at byte `first`."""
    return blocks[:, first : first + 2].copy().view("<f2").astype(np.float32)


def nibbles(packed: np.ndarray, parts: int) -> np.ndarray:
    """uint8 `[blocks, parts, 2, n]` of bytes `[blocks, parts * n]`: the low halves of a part, then its high ones."""
    grouped = packed.reshape(len(packed), parts, 1, -1)
    return np.concatenate([grouped & 0x0F, grouped >> 4], axis=2)


def _bits(packed: np.ndarray) -> np.ndarray:
    """uint8 `[blocks, 8 * n]`: bit i of the little-endian number in bytes `[blocks, n]`."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _pairs(packed: np.ndarray, parts: int) -> np.ndarray:
    """uint8 `[blocks, parts, 4, n]` of bytes `[blocks, parts * n]`: the four 2-bit numbers of each byte, the lowest of
    all bytes of a part first."""
    grouped = packed.reshape(len(packed), parts, 1, -1)
    return (grouped >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3


def _f32(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = blocks.view("<f4")


def _f16(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = blocks.view("<f2")


def _bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    np.left_shift(blocks.view("<u2"), np.uint32(16), out=out.view(np.uint32), casting="unsafe")


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), float16(blocks, 0), out=out)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    values = nibbles(blocks[:, 2:], 1).reshape(out.shape).view(np.int8)
    np.multiply(values - np.int8(8), float16(blocks, 0), out=out)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(nibbles(blocks[:, 4:], 1).reshape(out.shape), float16(blocks, 0), out=out)
    out += float16(blocks, 2)


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    values = nibbles(blocks[:, 6:], 1).reshape(out.shape) | (_bits(blocks[:, 2:6]) << 4)
    np.multiply(values.view(np.int8) - np.int8(16), float16(blocks, 0), out=out)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    values = nibbles(blocks[:, 8:], 1).reshape(out.shape) | (_bits(blocks[:, 4:8]) << 4)
    np.multiply(values, float16(blocks, 0), out=out)
    out += float16(blocks, 2)


def factors_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 `[blocks, 8, 1]` twice: the factors and the subtrahends of Q4_K and Q5_K. Each is a float16 times 6 bits;
    bytes 4 to 15 hold the first four of them whole, and the others in pieces."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minima = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)], axis=1)
    return (float16(blocks, 0) * scales)[..., None], (float16(blocks, 2) * minima)[..., None]


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    factors, minima = factors_k(blocks)
    parts = out.reshape(len(out), 8, 32)
    np.multiply(nibbles(blocks[:, 16:], 4).reshape(parts.shape), factors, out=parts)
    parts -= minima


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    factors, minima = factors_k(blocks)
    parts = out.reshape(len(out), 8, 32)
    high = _bits(blocks[:, 16:48]).reshape(len(out), 32, 8).transpose(0, 2, 1)  # bit p of byte i is of part p
    values = nibbles(blocks[:, 48:], 4).reshape(parts.shape) | (high << 4)
    np.multiply(values, factors, out=parts)
    parts -= minima


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    low = nibbles(blocks[:, :128], 2).reshape(len(out), 2, 4, 32)
    values = (low | (_pairs(blocks[:, 128:192], 2) << 4)).view(np.int8) - np.int8(32)
    factors = float16(blocks, 208) * blocks[:, 192:208].view(np.int8)
    np.multiply(values.reshape(len(out), 16, 16), factors[..., None], out=out.reshape(len(out), 16, 16))


def _q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    scales = blocks[:, :16]
    factors, minima = float16(blocks, 80) * (scales & 0x0F), float16(blocks, 82) * (scales >> 4)
    parts = out.reshape(len(out), 16, 16)
    np.multiply(_pairs(blocks[:, 16:80], 2).reshape(parts.shape), factors[..., None], out=parts)
    parts -= minima[..., None]


def _q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    low = _pairs(blocks[:, 32:96], 2).reshape(len(out), 8, 32)
    high = _bits(blocks[:, :32]).reshape(len(out), 32, 8).transpose(0, 2, 1)  # a missing bit takes 4 away
    values = (low | (high << 2)).view(np.int8) - np.int8(4)
    packed = blocks[:, 96:108]
    scales = nibbles(packed[:, :8], 1).reshape(len(out), 16) | (_pairs(packed[:, 8:], 1).reshape(len(out), 16) << 4)
    factors = float16(blocks, 108) * (scales.view(np.int8) - np.int8(32))
    np.multiply(values.reshape(len(out), 16, 16), factors[..., None], out=out.reshape(len(out), 16, 16))


_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""The numbers that the 16 codes of IQ4 stand for."""


def _iq4_nl(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_IQ4[nibbles(blocks[:, 2:], 1).reshape(out.shape)], float16(blocks, 0), out=out)


def _iq4_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    high = (blocks[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)).astype(np.uint8) & 3
    packed = blocks[:, 4:8, None]
    low = np.concatenate([packed & 0x0F, packed >> 4], axis=2).reshape(len(out), 8)
    factors = float16(blocks, 0) * ((low | (high << 4)).view(np.int8) - np.int8(32))
    parts = out.reshape(len(out), 8, 32)
    np.multiply(_IQ4[nibbles(blocks[:, 8:], 8).reshape(parts.shape)], factors[..., None], out=parts)


READABLE: Mapping[str, Convert] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
"""{type of a tensor: its conversion}."""

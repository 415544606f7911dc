"""Takes packed words apart into codes, and 8-bit floats into float32. Pure.

A uint32 word has 32 / bits codes, the first one in its lowest bits. AWQ's words have eight codes in another order.
"""

from __future__ import annotations

import numpy as np

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place, from the lowest bits of a word on, at which AWQ keeps the code of each of eight columns."""


def unpack_rows(words: np.ndarray, bits: int) -> np.ndarray:
    """uint32 `[rows, words]`, C-contiguous -> uint8 codes `[rows, words * 32 / bits]`. bits: 2, 4 or 8."""
    data = words.view(np.uint8)
    if bits == 8:
        return data
    per_byte = 8 // bits
    codes = np.empty((*data.shape, per_byte), np.uint8)
    for place in range(per_byte):
        np.right_shift(data, place * bits, out=codes[..., place])
    codes &= 2**bits - 1
    return codes.reshape(len(words), -1)


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """uint32 `[rows, columns / 8]`, C-contiguous -> uint8 codes `[rows, columns]`."""
    codes = unpack_rows(words, 4).reshape(len(words), -1, 8)
    return codes[..., AWQ_PLACES].reshape(len(words), -1)


def transposed(array: np.ndarray) -> np.ndarray:
    """A C-contiguous copy with the axes swapped."""
    return np.ascontiguousarray(array.T)


def float8_table() -> np.ndarray:
    """float32 value of each E4M3 pattern (sign, 4 bits of exponent, 3 of mantissa; no infinities; OCP FP8)."""
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, (codes & 7) / 8
    magnitude = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7.0))
    table: np.ndarray = np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)
    table[[0x7F, 0xFF]] = np.nan
    return table


FLOAT8_E4M3 = float8_table()

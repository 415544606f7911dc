"""Converts float32 to and from the two 16-bit formats. NumPy has no bfloat16: it is the upper half of a float32."""

from __future__ import annotations

import numpy as np

_QUIET_NAN = 0x7FC0


def widen_bfloat16(bits: np.ndarray, out: np.ndarray) -> None:
    """uint16 bit patterns into float32 `out` of the same shape; exact."""
    np.left_shift(bits, np.uint32(16), out=out.view(np.uint32))


def narrow_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Bit patterns (uint16) of float32 values, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = _QUIET_NAN
    return rounded

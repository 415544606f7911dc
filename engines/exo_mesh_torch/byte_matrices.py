"""Matrices of one byte a weight: int8 with a scale a row, multiplied by torch's int8 kernel, and 8-bit floats.

Measured with one thread of an AVX-512 CPU and 4096 x 2048 weights, one row of activations: int8 0.21 ms, two matrices
of 4-bit codes 0.45, 8-bit floats 1.8, plain bfloat16 0.65 and float32 1.4. torch's own conversion of 8-bit floats would
take 24 ms, and its multiplication of them 53.
"""

from __future__ import annotations

import torch

from exo_mesh_torch.int4 import BLOCK_BYTES, MAX_KERNEL_ROWS

_SIGN_AND_VALUE = -0x80000000 | 0x7F << 20
"""Bits of a float32 that a pattern of E4M3 fills, once it is in the upper bits of the exponent and mantissa."""

_EXPONENT_SHIFT = 2.0**120
"""float32's bias of exponents is 127, E4M3's 7."""


def row_matrix_bytes(rows: int, columns: int) -> int:
    """Bytes of memory of a RowMatrix."""
    return rows * (columns + 8)


def float8_bytes(rows: int, columns: int, block: tuple[int, int]) -> int:
    """Bytes of memory of a Float8Matrix."""
    return rows * columns + 4 * -(-rows // block[0]) * -(-columns // block[1])


class RowMatrix:
    """A matrix `[rows, columns]` of int8 numbers, with a scale and a bias per row."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self._numbers = torch.empty((rows, columns), dtype=torch.int8)
        self._scales, self._biases, self._has_biases = torch.empty(rows), torch.empty(rows), False

    @property
    def num_bytes(self) -> int:
        return row_matrix_bytes(self.rows, self.columns)

    def fill(self, first: int, codes: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor) -> None:
        """Put rows `[first, first + n)` in place. codes uint8 `[n, columns]`; scales, biases `[n]`, of values
        `scale * code + bias`."""
        part = slice(first, first + len(codes))
        self._numbers[part] = (codes ^ 0x80).view(torch.int8)
        self._scales[part] = scales
        self._biases[part] = biases + 128 * scales
        self._has_biases = self._has_biases or bool(self._biases[part].any())

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """`[n, columns]` -> `[n, rows]` in the dtype of states, with the accuracy of bfloat16."""
        if not len(states):
            return states.new_empty((0, self.rows))
        if len(states) <= MAX_KERNEL_ROWS:
            narrow = states.to(torch.bfloat16).contiguous()
            ones = torch.ones(self.rows, dtype=torch.bfloat16)  # scales in bfloat16 would be less accurate
            product = torch._weight_int8pack_mm(narrow, self._numbers, ones).float()
        else:
            product = self._multiply_dense(states)
        product *= self._scales
        if self._has_biases:
            product.addr_(states.float().sum(-1), self._biases)
        return product.to(states.dtype)

    def _multiply_dense(self, states: torch.Tensor) -> torch.Tensor:
        product = torch.empty((len(states), self.rows))
        step = max(1, BLOCK_BYTES // (4 * self.columns))
        for first in range(0, self.rows, step):
            numbers = self._numbers[first : first + step].to(states.dtype)
            product[:, first : first + step] = states @ numbers.t()
        return product

    def lines(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix: ids int64 `[n]` -> float32 `[n, columns]`."""
        values = self._numbers[ids].float().mul_(self._scales[ids].unsqueeze(-1))
        return values.add_(self._biases[ids].unsqueeze(-1))


class Float8Matrix:
    """A matrix `[rows, columns]` of E4M3 numbers, with a scale per block of rows and columns."""

    def __init__(self, rows: int, columns: int, scales: torch.Tensor, block: tuple[int, int]) -> None:
        """scales: float32 `[blocks of rows, blocks of columns]`. block: the size of these blocks."""
        self.rows, self.columns, self._block = rows, columns, block
        self._codes = torch.empty((rows, columns), dtype=torch.int8)
        self._scales = scales * _EXPONENT_SHIFT

    @property
    def num_bytes(self) -> int:
        return float8_bytes(self.rows, self.columns, self._block)

    def fill(self, first: int, codes: torch.Tensor) -> None:
        """Put rows in place. codes: uint8 `[n, columns]`."""
        self._codes[first : first + len(codes)] = codes.view(torch.int8)

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """`[n, columns]` -> `[n, rows]` in the dtype of states, with the accuracy of weights in that dtype."""
        product = states.new_empty((len(states), self.rows))
        step = max(1, BLOCK_BYTES // (4 * self.columns))
        for first in range(0, self.rows, step):
            numbers = torch.arange(first, min(self.rows, first + step))
            weights = self._values(self._codes[first : first + step], numbers).to(states.dtype)
            product[:, first : first + step] = states @ weights.t()
        return product

    def lines(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix: ids int64 `[n]` -> float32 `[n, columns]`."""
        return self._values(self._codes[ids], ids)

    def _values(self, codes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """float32 values of int8 patterns `[n, columns]` of rows with these numbers."""
        bits = codes.to(torch.int32)
        bits <<= 20
        bits &= _SIGN_AND_VALUE
        values, width = bits.view(torch.float32), self._block[1]
        scales = self._scales[numbers // self._block[0]]
        if self.columns % width == 0:
            values.view(len(codes), -1, width).mul_(scales.unsqueeze(-1))
            return values
        return values.mul_(scales.repeat_interleave(width, -1)[:, : self.columns])

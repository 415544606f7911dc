"""Matrices of 4-bit and 8-bit codes, held in the order of torch's int4 kernel for CPUs, and multiplied by it.

The kernel multiplies bfloat16 rows by `scale * (code - 8) + shift`, with bfloat16 scales and shifts per group of
columns. 8-bit codes are two such matrices: one of the high halves with 16 times the scale, and one of the low halves.
"""

from __future__ import annotations

import platform
from functools import cache

import torch

GROUP_SIZES = (32, 64, 128, 256)
"""Numbers of columns that the kernel lets share a scale."""

BITS = (4, 8)

MAX_KERNEL_ROWS = 64
"""More rows are multiplied by weights that are dequantised by blocks. Measured with one thread of an AVX-512 CPU and
2048 x 2048 weights, 64 rows: 4 ms in both ways in bfloat16, and 4 ms against 8 in float32."""

BLOCK_BYTES = 2**22
"""Bytes of float32 weights that are dequantised at once; larger blocks leave the caches."""


def can_multiply() -> bool:
    """Whether the kernel is here and fast: x86-64 with AVX2. torch's other version takes 80 times as long."""
    return platform.machine() in ("x86_64", "AMD64") and _layout() is not None


def held_bytes(rows: int, columns: int, bits: int, group_size: int, *, has_order: bool = False) -> int:
    """Bytes of memory of a matrix. has_order: whether its columns may be reordered."""
    padded = -(-rows // 64) * 64
    return bits // 4 * padded * (columns // 2 + columns // group_size * 4) + 8 * columns * has_order


@cache
def _layout() -> int | None:
    """Rows of a block of the kernel's order on this CPU: in each, byte i of a column has the codes of rows i and
    i + half a block. None if the order is another one."""
    block = {"AVX512": 64, "AVX2": 32}.get(torch.backends.cpu.get_cpu_capability())
    if block is None:
        return None
    codes = torch.randint(0, 16, (128, 64), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    found = _halves(packed.view(-1, 64, block // 2), -1).transpose(1, 2).reshape(128, 64)
    return block if torch.equal(found, codes) else None


def _halves(packed: torch.Tensor, axis: int) -> torch.Tensor:
    """The low halves of bytes, then the high ones, along `axis`."""
    return torch.cat((packed & 15, packed >> 4), axis)


class CodeMatrix:
    """A matrix `[rows, columns]` of 4-bit or 8-bit codes. Call `fill` for all rows before anything else."""

    def __init__(self, rows: int, columns: int, bits: int, group_size: int, order: torch.Tensor | None = None) -> None:
        """bits, group_size: some of BITS and GROUP_SIZES; group_size divides columns. order int64 `[columns]`: the
        column of the weight that is at each place of the codes; None if they are in the same order."""
        self._order = order
        self.rows, self.columns, self.bits, self.group_size = rows, columns, bits, group_size
        self._parts = [_Part(rows, columns, group_size) for _ in range(bits // 4)]

    @property
    def num_bytes(self) -> int:
        parts: int = sum(part.packed.nbytes + part.factors.nbytes for part in self._parts)
        return parts + (0 if self._order is None else 8 * self.columns)

    def fill(self, first: int, codes: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor) -> None:
        """Put rows `[first, first + n)` in place. codes uint8 `[n, columns]`; scales, biases `[n, groups]`, of values
        `scale * code + bias`. first is a multiple of 64; n too, unless the rows are the last ones."""
        scales = scales.float()
        if len(self._parts) == 1:
            self._parts[0].fill(first, codes, scales, biases.float() + 8 * scales)
            return
        shifts = biases.float() + 136 * scales
        rounded = shifts.bfloat16().float()
        high, low = self._parts
        high.fill(first, codes >> 4, 16 * scales, rounded)
        low.fill(first, codes & 15, scales, shifts - rounded)

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """`[n, columns]` -> `[n, rows]` in the dtype of states, with the accuracy of bfloat16."""
        if self._order is not None:
            states = states.index_select(-1, self._order)
        if len(states) <= MAX_KERNEL_ROWS:
            narrow = states.to(torch.bfloat16).contiguous()
            products = [part.multiply(narrow) for part in self._parts]
            result = products[0] if len(products) == 1 else products[0].float().add_(products[1])
            return result[:, : self.rows].to(states.dtype)
        return self._multiply_dense(states)

    def _multiply_dense(self, states: torch.Tensor) -> torch.Tensor:
        result = states.new_empty((len(states), self._parts[0].padded))
        block = self._parts[0].block
        step = max(1, BLOCK_BYTES // (4 * block * self.columns))
        for first in range(0, self._parts[0].padded // block, step):
            weights = self._parts[0].dense(first, step)
            for part in self._parts[1:]:
                weights += part.dense(first, step)
            product = torch.matmul(states, weights.to(states.dtype))  # [blocks, n, block]
            columns = slice(first * block, (first + len(product)) * block)
            result[:, columns] = product.transpose(0, 1).reshape(len(states), -1)
        return result[:, : self.rows]

    def lines(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix: ids int64 `[n]` -> float32 `[n, columns]`."""
        total = self._parts[0].lines(ids)
        for part in self._parts[1:]:
            total += part.lines(ids)
        return total if self._order is None else torch.empty_like(total).index_copy_(-1, self._order, total)


class _Part:
    """A matrix of 4-bit codes. Rows are filled up to a multiple of 64 with zeros."""

    __slots__ = ("block", "columns", "factors", "group_size", "packed", "padded")

    def __init__(self, rows: int, columns: int, group_size: int) -> None:
        block = _layout()
        assert block is not None, "callers ask can_multiply first"
        self.block, self.columns, self.group_size = block, columns, group_size
        self.padded = -(-rows // 64) * 64
        self.packed = torch.empty((self.padded, columns // 2), dtype=torch.uint8)
        self.factors = torch.zeros((columns // group_size, self.padded, 2), dtype=torch.bfloat16)

    def fill(self, first: int, codes: torch.Tensor, scales: torch.Tensor, shifts: torch.Tensor) -> None:
        count = len(codes)
        whole = torch.zeros((-(-count // 64) * 64, self.columns), dtype=torch.int32)
        whole[:count] = codes
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1)
        self.packed[first : first + len(whole)] = packed
        self.factors[:, first : first + count, 0] = scales.t()
        self.factors[:, first : first + count, 1] = shifts.t()

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        if not len(states):
            return states.new_empty((0, self.padded))
        product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            states, self.packed, self.group_size, self.factors
        )
        return product

    def dense(self, first: int, count: int) -> torch.Tensor:
        """float32 `[blocks, columns, block]`: blocks `[first, first + count)`, transposed."""
        blocks = self.packed.view(-1, self.columns, self.block // 2)[first : first + count]
        codes = _halves(blocks, -1).float().view(len(blocks), -1, self.group_size, self.block)
        factors = self.factors.view(-1, self.padded // self.block, self.block, 2)[:, first : first + count]
        scales, shifts = factors.float().transpose(0, 1).unsqueeze(2).unbind(-1)
        # strided factors would take three times as long
        scales = scales.contiguous()
        biases = shifts - 8 * scales
        return torch.addcmul(biases, codes, scales, out=codes).view(len(blocks), self.columns, self.block)

    def lines(self, ids: torch.Tensor) -> torch.Tensor:
        half = self.block // 2
        blocks, offsets = ids // self.block, ids % self.block
        found = self.packed.view(-1, self.columns, half)[blocks, :, offsets % half]
        codes = torch.where((offsets >= half)[:, None], found >> 4, found & 15)
        scales, shifts = self.factors[:, ids].float().transpose(0, 1).unsqueeze(2).unbind(-1)
        values = codes.float().view(len(ids), -1, self.group_size).sub_(8).mul_(scales).add_(shifts)
        return values.view(len(ids), self.columns)

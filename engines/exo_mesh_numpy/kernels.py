"""Matrix products in the two modes. Everything else of a layer works value by value or row by row.

BLAS chooses its inner loops by shape, and an edge of a matrix may use another loop than its middle. So the bits of a
row may change with the number of rows, with its place among them, and with the number of threads. In OpenBLAS's Haswell
and Zen kernels they change even within a fixed tile of 16 rows, if rows are the first operand.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from exo_mesh.errors import EngineError
from exo_mesh_numpy.scratch import Scratch

TILE = 16
"""Rows of a tile: a multiple of the SIMD width of every CPU that NumPy's wheels support."""

DEPTH = 512
"""Inputs of a tile's product. TILE x TILE x DEPTH multiplications stay below the 2**18 above which OpenBLAS uses
threads (SMP_THRESHOLD_MIN * GEMM_MULTITHREAD_THRESHOLD in its sources), so the number of threads does not change the
bits."""

SPAN = 256 * TILE
"""Outputs that are computed before they are copied to their place: limits the scratch of a product."""


class Kernels(Protocol):
    """Matrix products of a mode. row_exact: whether the bits of a row depend on that row alone. max_tokens: most tokens
    of one pass through the layers."""

    row_exact: bool
    max_tokens: int

    def padded(self, num_rows: int) -> int:
        """Rows that a buffer must have for num_rows >= 1 rows; the extra rows may hold any finite values."""

    def product(self, rows: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
        """out = rows · weightᵀ. rows: float32 C-contiguous `[padded, inputs]`; weight: `[outputs, inputs]`."""


class FastKernels:
    """Plain BLAS, one product for all rows."""

    row_exact = False
    max_tokens = 256

    SINGLE_ROWS = 3
    """Number of rows up to which a product per row is faster than one for all, because BLAS repacks the weights for the
    latter. OpenBLAS 0.3.31 on one Zen core, 2048 to 11264, ms per row / for all: 2 rows 6.6 / 11.2, 3 rows 8.8 / 14.4,
    4 rows 10.7 / 10.5, 6 rows 17 / 13.1, 8 rows 22 / 8.0. And 6 rows take longer than 8, hence the multiples of 8."""

    def padded(self, num_rows: int) -> int:
        return num_rows if num_rows <= self.SINGLE_ROWS + 1 else -(-num_rows // 8) * 8

    def product(self, rows: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
        if len(rows) > self.SINGLE_ROWS:
            np.matmul(rows, weight.T, out=out)
            return
        for row, result in zip(rows, out, strict=True):
            np.dot(weight, row, out=result)


class TiledKernels:
    """Products in fixed tiles: each row is a SIMD lane of a tile of 16 rows, 16 outputs and at most 512 inputs,
    whatever else is computed.

    Lanes of a vector go through the same operations, so neither the other rows nor a row's place matter.
    """

    row_exact = True
    max_tokens = 4 * TILE

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def padded(self, num_rows: int) -> int:
        return -(-num_rows // TILE) * TILE

    def product(self, rows: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
        tiles = rows.reshape(-1, TILE, rows.shape[1])
        num_outputs = len(weight)
        if num_outputs < TILE:
            weight = np.concatenate([weight, np.zeros((TILE - num_outputs, weight.shape[1]), np.float32)])
        whole = num_outputs // TILE * TILE
        for begin in range(0, whole, SPAN):
            end = min(begin + SPAN, whole)
            self._span(tiles, weight[begin:end], out[:, begin:end])
        if whole < num_outputs:
            # the last tile overlaps outputs that are done, so that it has the shape of all others
            last = self._scratch.take("last outputs", len(rows), TILE)
            self._span(tiles, weight[-TILE:], last)
            first = max(0, num_outputs - TILE)
            out[:, whole:] = last[:, whole - first : num_outputs - first]

    def _span(self, tiles: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
        """tiles `[t, 16, inputs]`, weight `[16 * b, inputs]` into out `[16 * t, 16 * b]`."""
        num_tiles, _, num_inputs = tiles.shape
        blocks = weight.reshape(-1, 1, TILE, num_inputs)
        total = self._scratch.take("product", len(blocks), num_tiles, TILE, TILE)
        part = self._scratch.take("product part", len(blocks), num_tiles, TILE, TILE)
        columns = tiles.swapaxes(1, 2)
        for begin in range(0, num_inputs, DEPTH):
            depth = slice(begin, begin + DEPTH)
            np.matmul(blocks[..., depth], columns[:, depth], out=part if begin else total)
            if begin:
                total += part
        out.reshape(num_tiles, TILE, -1, TILE)[...] = total.transpose(1, 3, 0, 2)


def check_tiles(depths: set[int], head_dim: int, key_block: int) -> None:
    """Check with random numbers that this machine's BLAS keeps the promise of `TiledKernels` for these numbers of
    inputs, and for the products of attention. Raises EngineError if it does not."""
    rng = np.random.default_rng(0)
    inner = {min(DEPTH, depth) for depth in depths} | {depth % DEPTH for depth in depths if depth % DEPTH}
    shapes = {(TILE, depth) for depth in inner} | {(key_block, head_dim), (head_dim, key_block)}
    for num_outputs, depth in sorted(shapes):
        weight = rng.standard_normal((num_outputs, depth), dtype=np.float32)
        rows = rng.standard_normal((TILE, depth), dtype=np.float32)
        together = np.matmul(weight, rows.T)
        for shift in range(TILE):
            alone = np.zeros_like(rows)
            alone[shift] = rows[0]
            moved = np.matmul(weight, np.roll(rows, shift, axis=0).T)
            same = np.array_equal(np.matmul(weight, alone.T)[:, shift], together[:, 0])
            if not same or not np.array_equal(np.roll(moved, -shift, axis=1), together):
                raise EngineError(
                    "mode=deterministic does not work on this machine: its BLAS gives a row other bits at another "
                    f"place of a tile of {num_outputs} x {depth} x {TILE}; use mode=fast"
                )

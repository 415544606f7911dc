"""Makes a QR code of a short text (ISO/IEC 18004): byte mode, error correction level M, versions 1 to 6. Pure.

Level M repairs 15 % of the symbol. Versions above 6 need version information, which a text of at most 106 bytes does
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

_BLOCKS = {1: (10, 1, 16), 2: (16, 1, 28), 3: (26, 1, 44), 4: (18, 2, 32), 5: (24, 2, 43), 6: (16, 4, 27)}
"""For each version at level M: (correction codewords per block, blocks, data codewords per block) (table 9)."""
MAX_BYTES = 106

_FORMAT_GENERATOR, _FORMAT_MASK = 0x537, 0x5412
_LEVEL_M = 0b00
_FIELD = 0x11D

_MASKS: Sequence[Callable[[int, int], bool]] = (
    lambda row, column: (row + column) % 2 == 0,
    lambda row, column: row % 2 == 0,
    lambda row, column: column % 3 == 0,
    lambda row, column: (row + column) % 3 == 0,
    lambda row, column: (row // 2 + column // 3) % 2 == 0,
    lambda row, column: row * column % 2 + row * column % 3 == 0,
    lambda row, column: (row * column % 2 + row * column % 3) % 2 == 0,
    lambda row, column: ((row + column) % 2 + row * column % 3) % 2 == 0,
)
"""Table 10: the data modules that each mask inverts. The mask with the lowest penalty is used."""

Grid = list[list[bool]]


def qr_rows(text: str) -> list[str]:
    """The rows of modules of a QR code, "1" for a dark module; without the quiet zone, which is 4 modules wide.

    Raises ValueError for a text of more than MAX_BYTES bytes.
    """
    data = text.encode()
    version = next((one for one, (_, blocks, size) in _BLOCKS.items() if len(data) + 2 <= blocks * size), None)
    if version is None:
        raise ValueError(f"the text has {len(data)} bytes; a QR code of this size holds at most {MAX_BYTES}")
    bits = _bits(_codewords(data, version))
    symbols = (_symbol(version, bits, mask) for mask in range(len(_MASKS)))
    return ["".join("01"[dark] for dark in row) for row in min(symbols, key=_penalty)]


# codewords


def _codewords(data: bytes, version: int) -> bytes:
    """Data and correction codewords, interleaved block by block."""
    correction, blocks, size = _BLOCKS[version]
    number = (0b0100 << 8 | len(data)) << 8 * len(data) | int.from_bytes(data)
    packed = (number << 4).to_bytes(len(data) + 2)  # 4 bits end the data
    padding = bytes((0xEC, 0x11)) * (blocks * size)
    whole = (packed + padding)[: blocks * size]
    parts = [whole[start : start + size] for start in range(0, len(whole), size)]
    checks = [_correction(part, correction) for part in parts]
    return bytes(part[at] for at in range(size) for part in parts) + bytes(
        check[at] for at in range(correction) for check in checks
    )


def _correction(data: bytes, count: int) -> bytes:
    """The Reed-Solomon correction codewords: the remainder of the data by the generator polynomial over GF(256)."""
    generator = [1]
    for power in range(count):
        root = _power(power)
        shifted = [*generator, 0]
        generator = [a ^ _times(b, root) for a, b in zip(shifted, [0, *generator], strict=True)]
    rest = [0] * count
    for value in data:
        factor = value ^ rest[0]
        rest = [a ^ _times(b, factor) for a, b in zip([*rest[1:], 0], generator[1:], strict=True)]
    return bytes(rest)


def _times(a: int, b: int) -> int:
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = a << 1 ^ (_FIELD if a & 0x80 else 0)
        b >>= 1
    return product


def _power(exponent: int) -> int:
    """2 to this power in GF(256)."""
    value = 1
    for _ in range(exponent):
        value = _times(value, 2)
    return value


def _bits(codewords: bytes) -> list[bool]:
    return [bool(word >> bit & 1) for word in codewords for bit in reversed(range(8))]


# the symbol


def _symbol(version: int, bits: Sequence[bool], mask: int) -> Grid:
    size = 17 + 4 * version
    fixed = {**_patterns(version, size), **_format(mask, size)}
    grid = [[fixed.get((row, column), False) for column in range(size)] for row in range(size)]
    places = (place for place in _way(size) if place not in fixed)
    for index, (row, column) in enumerate(places):
        bit = index < len(bits) and bits[index]
        grid[row][column] = bit ^ _MASKS[mask](row, column)
    return grid


def _patterns(version: int, size: int) -> dict[tuple[int, int], bool]:
    """The modules that are the same in every symbol of a version."""
    found = {}
    for at in range(8, size - 8):
        found[6, at] = found[at, 6] = at % 2 == 0
    for top, left in ((0, 0), (0, size - 7), (size - 7, 0)):
        for row in range(max(0, top - 1), min(size, top + 8)):
            for column in range(max(0, left - 1), min(size, left + 8)):
                ring = max(abs(row - top - 3), abs(column - left - 3))
                found[row, column] = ring in (0, 1, 3)
    if version > 1:
        middle = size - 7
        for row in range(middle - 2, middle + 3):
            for column in range(middle - 2, middle + 3):
                found[row, column] = max(abs(row - middle), abs(column - middle)) != 1
    found[size - 8, 8] = True
    return found


def _format(mask: int, size: int) -> dict[tuple[int, int], bool]:
    """The modules of the format information: level and mask with a BCH code, in two places."""
    value = _LEVEL_M << 3 | mask
    rest = value << 10
    for bit in reversed(range(10, 15)):
        if rest >> bit & 1:
            rest ^= _FORMAT_GENERATOR << bit - 10
    code = (value << 10 | rest) ^ _FORMAT_MASK
    by_corner = [(row, 8) for row in (0, 1, 2, 3, 4, 5, 7, 8)] + [(8, column) for column in (7, 5, 4, 3, 2, 1, 0)]
    apart = [(8, size - 1 - at) for at in range(8)] + [(size - 7 + at, 8) for at in range(7)]
    return {place: bool(code >> bit & 1) for places in (by_corner, apart) for bit, place in enumerate(places)}


def _way(size: int) -> Iterator[tuple[int, int]]:
    """Yields every place in the order of the data: pairs of columns from the right, first upwards, then downwards."""
    upwards = True
    for right in (*range(size - 1, 6, -2), *range(5, 0, -2)):
        for row in reversed(range(size)) if upwards else range(size):
            yield row, right
            yield row, right - 1
        upwards = not upwards


def _penalty(grid: Grid) -> int:
    """The penalty of a symbol: a higher one is harder to read (7.8.3)."""
    size = len(grid)
    lines = [*grid, *(list(column) for column in zip(*grid, strict=True))]
    runs = [len(list(group)) for line in lines for _, group in groupby(line)]
    points = sum(run - 2 for run in runs if run >= 5)
    points += 3 * sum(
        grid[row][column] == grid[row][column + 1] == grid[row + 1][column] == grid[row + 1][column + 1]
        for row in range(size - 1)
        for column in range(size - 1)
    )
    finder = "1011101"
    for line in lines:
        text = "0000" + "".join("01"[dark] for dark in line) + "0000"
        starts = [at for at in range(len(text)) if text.startswith(finder, at)]
        points += 40 * sum(text[at - 4 : at] == "0000" or text[at + 7 : at + 11] == "0000" for at in starts)
    share = sum(map(sum, grid)) * 100 / size**2
    return points + 10 * int(abs(share - 50) / 5)

"""QR codes: read back from their modules by the steps of the standard, and one symbol that other readers understood."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_mesh.api.web import qr
from exo_mesh.api.web.qr import MAX_BYTES, qr_rows
from exo_mesh.cli.verbs.invite import qr_text

# read by OpenCV 5.0; equal to the symbol of segno 1.6 with this mask, but for segno's padding
KNOWN = """
111111100001101111111
100000100001001000001
101110101100101011101
101110101100001011101
101110101001101011101
100000101100101000001
111111101010101111111
000000001011100000000
101111100010101111100
001110011100101110011
011010110001000000110
100000011110000011110
001000101101000100010
000000001011111011001
111111100000101001010
100000101101111000100
101110101010100000001
101110101010100111000
101110101001010001100
100000100110000001100
111111101011010010010
"""


def test_a_known_symbol() -> None:
    assert "\n".join(qr_rows("exo-mesh")) == KNOWN.strip()


@given(st.text(string.ascii_letters + string.digits + ":/-.[]% é", max_size=MAX_BYTES // 2))
@settings(max_examples=15, deadline=None)
def test_a_reader_finds_the_text(text: str) -> None:
    assert read(qr_rows(text)) == text


@pytest.mark.parametrize("size", [14, 15, 26, 27, 42, 43, 62, 63, 84, 85, 106])
def test_every_version_is_read_at_its_limits(size: int) -> None:
    assert read(qr_rows("x" * size)) == "x" * size


def test_a_terminal_shows_the_modules_dark_on_light_with_a_quiet_zone() -> None:
    rows = qr_rows("exo-mesh")
    lines = qr_text(rows, 80).splitlines()
    assert all(line.startswith("\x1b[30;107m") and line.endswith("\x1b[0m") for line in lines)
    halves = {" ": "00", "▀": "10", "▄": "01", "█": "11"}
    shown = [line.removeprefix("\x1b[30;107m").removesuffix("\x1b[0m") for line in lines]
    modules = ["".join(halves[half][place] for half in line) for line in shown for place in (0, 1)]
    assert [row[4:-4] for row in modules[4 : 4 + len(rows)]] == rows
    assert "1" not in "".join(modules[:4] + modules[4 + len(rows) :] + [row[:4] + row[-4:] for row in modules])
    assert qr_text(rows, len(rows) + 7) == "" and qr_text([], 80) == "", "too narrow, or no code"


def test_a_longer_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"107 bytes.*at most 106"):
        qr_rows("x" * 107)


def read(rows: list[str]) -> str:
    """The text of a symbol without errors."""
    size = len(rows)
    version = (size - 17) // 4
    grid = [[module == "1" for module in row] for row in rows]
    masks = [mask for mask in range(8) if all(grid[r][c] == dark for (r, c), dark in qr._format(mask, size).items())]
    assert len(masks) == 1, "both copies of the format say the same"
    patterns = qr._patterns(version, size)
    assert all(grid[row][column] == dark for (row, column), dark in patterns.items())
    fixed = {**patterns, **qr._format(masks[0], size)}
    bits = [grid[r][c] ^ qr._MASKS[masks[0]](r, c) for r, c in qr._way(size) if (r, c) not in fixed]
    words = [int("".join("01"[bit] for bit in bits[at : at + 8]), 2) for at in range(0, len(bits) // 8 * 8, 8)]
    correction, blocks, data_size = qr._BLOCKS[version]
    parts = [words[block : blocks * data_size : blocks] for block in range(blocks)]
    checks = [words[blocks * data_size + block :: blocks] for block in range(blocks)]
    for part, check in zip(parts, checks, strict=True):
        assert syndromes([*part, *check], correction) == [0] * correction
    data = "".join(f"{word:08b}" for part in parts for word in part)
    assert data[:4] == "0100"
    return bytes(int(data[at : at + 8], 2) for at in range(12, 12 + 8 * int(data[4:12], 2), 8)).decode()


def syndromes(words: list[int], count: int) -> list[int]:
    """The words as a polynomial, at the roots of the generator: zero without errors."""
    found = []
    for power in range(count):
        value = 0
        for word in words:
            value = qr._times(value, qr._power(power)) ^ word
        found.append(value)
    return found

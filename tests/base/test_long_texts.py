"""Long texts are taken out of JSON and put back, and nothing else changes."""

from __future__ import annotations

import json
import random
import tracemalloc

import msgspec
import pytest

from exo_mesh.base.long_texts import (
    LONG,
    SLICE,
    LongTexts,
    decode_long,
    first_wrong_byte,
    json_parts,
    json_size,
    long_strings,
    slices,
)

PIECES = ("a", '"', "\\", "\\\\\\", "\n", "é", "中", "😀", "u0041", "\x01", "", "/")


def decoded(body: bytes | bytearray) -> object:
    return decode_long(body, long_strings(body))


def drawn_text(rng: random.Random) -> str:
    piece = "".join(rng.choices(PIECES, k=rng.randint(1, 30)))
    return piece * (rng.choice((1, LONG, 3 * LONG)) // len(piece) + rng.randint(0, 3)) if piece else ""


def drawn_value(rng: random.Random, depth: int = 0) -> object:
    match rng.randrange(6 if depth < 3 else 4):
        case 0:
            return drawn_text(rng)
        case 1:
            return rng.choice((None, True, 5, -1.5e300))
        case 2 | 3:
            return "".join(rng.choices(PIECES, k=rng.randint(0, 9)))
        case 4:
            return [drawn_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
        case _:
            names = (drawn_text(rng) if rng.random() < 0.1 else str(index) for index in range(rng.randint(0, 3)))
            return {name: drawn_value(rng, depth + 1) for name in names}


@pytest.mark.parametrize("seed", range(12))
def test_json_with_long_texts_is_decoded_and_dumped_as_by_the_libraries(seed: int) -> None:
    rng = random.Random(seed)
    value = [drawn_value(rng), drawn_text(rng)]
    for is_ascii in (True, False):
        body = bytearray(json.dumps(value, ensure_ascii=is_ascii).encode())
        body[1:1] = b" " * rng.randint(0, 2 * SLICE)
        assert decoded(body) == msgspec.json.decode(body) == value
    for options in ({"sort_keys": True}, {"ensure_ascii": False, "separators": (",", ":")}):
        assert "".join(json_parts(value, **options)) == json.dumps(value, **options)
    plain = len(msgspec.json.encode(value))
    assert plain / 6 <= json_size(value) <= plain + 100
    long = LongTexts()
    assert long.back_in(msgspec.json.decode(msgspec.json.encode(long.out_of(value)))) == value
    assert all("".join(slices(long[index])) == long[index] for index in range(len(long)))


@pytest.mark.parametrize("unit", ["\\\\", "\\n", "\\u0041", "\\ud83d\\ude00", "\\\\\\ud83d\\ude00", "😀", "a中", '\\"'])
@pytest.mark.parametrize("shift", range(0, 13, 3))
def test_no_escape_and_no_character_is_cut(unit: str, shift: int) -> None:
    body = f'["{"x" * shift}{unit * (3 * SLICE // len(unit.encode()))}"]'.encode()
    assert decoded(body) == msgspec.json.decode(body)


def test_a_mistake_in_or_behind_a_long_text_is_named_at_its_place() -> None:
    text = b"a" * (2 * LONG)
    for body in (
        b'["%b\x01"]' % text,
        b'["%b\\x"]' % text,
        b'["%b" 1]' % text,
        b'[\\"%b"]' % text,
        b'["a\x01", "%b"]' % text,
        b'["%b\\u12"]' % text,
        b'["%b' % text,
        b'["%b", nul, "%b"]' % (text, text),
    ):
        with pytest.raises(msgspec.DecodeError) as wanted:
            msgspec.json.decode(body)
        with pytest.raises(msgspec.DecodeError) as found:
            decoded(body)
        assert str(found.value) == str(wanted.value)


@pytest.mark.parametrize("wrong", [b"\xff", b"\xc3", b"\xe2\x82", b"\xed\xa0\x80"])
@pytest.mark.parametrize("before", [0, 5, SLICE - 3, SLICE - 2, SLICE - 1, SLICE, LONG, 2 * LONG + 1])
def test_the_first_byte_that_is_not_utf8_is_found(before: int, wrong: bytes) -> None:
    body = b'["%b"]' % (b"a" * before + wrong)
    with pytest.raises(msgspec.DecodeError, match="UTF-8"):
        decoded(body)
    assert first_wrong_byte(body) == 2 + before
    assert first_wrong_byte(body[: 2 + before] + "é€😀".encode() * SLICE) is None
    assert first_wrong_byte(body[: 2 + before] + wrong[:1]) == 2 + before, "cut at its end"


def test_what_has_no_long_text_is_not_copied() -> None:
    value = {"a": ["b", {"c": 1}], "d": ("e",)}
    long = LongTexts()
    assert long.out_of(value) is value
    assert len(long) == 0


def test_a_long_text_grows_in_place_while_it_is_decoded() -> None:
    size = 32 * SLICE
    body = b'["' + b"a" * size + b'"]'
    tracemalloc.start()
    try:
        decoded(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.6 * size, "a copy of the text, or of the body"

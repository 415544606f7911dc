"""Takes the long texts out of JSON and of JSON values, so that they are worked on slice by slice. Pure.

A library that decodes or encodes JSON holds the interpreter until it is done: 2 ms for each million characters, in
which a node answers nobody else. With a short stand-in for each long text it takes no time worth mentioning.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import msgspec

LONG = 1 << 17
"""A text with as many bytes or characters is long."""

SLICE = 1 << 16
"""Bytes or characters that are worked on at a time, which takes 0.1 ms; up to 0.4 ms where all of them are escaped."""

_PAIR = 12
"""Bytes of the longest escape in JSON: two halves of one character."""

_CUT_ESCAPE = re.compile(rb"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?")
"""An escape that is not complete, or that is the first half of a character."""

_BACKSLASH = 0x5C

_PADDING = b" " * _PAIR
"""Without it, an escape that the string cuts would be called the end of the data."""

_BYTE = re.compile(r"\(byte (\d+)\)")


class LongTexts:
    """The long texts of one value, and their stand-ins."""

    def __init__(self, mark: str = "", texts: Iterable[str] = ()) -> None:
        """mark: what all stand-ins begin with, and no text of the value; "": random digits, once there is a text."""
        self.mark = mark
        self._texts: dict[str, str] = {}
        for text in texts:
            self.take(text)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> str:
        return self._texts[f"{self.mark}.{index}"]

    def take(self, text: str) -> str:
        """Keep a text; returns its stand-in."""
        self.mark = self.mark or os.urandom(10).hex()
        stand_in = f"{self.mark}.{len(self._texts)}"
        self._texts[stand_in] = text
        return stand_in

    def out_of(self, value: Any) -> Any:
        """The JSON value with stand-ins. What has no long text is not copied. Raises RecursionError."""
        if isinstance(value, str):
            return self.take(value) if len(value) >= LONG else value
        before, made = len(self), value
        if isinstance(value, list | tuple):
            made = [self.out_of(item) for item in value]
        elif isinstance(value, dict):
            made = {self.out_of(name): self.out_of(item) for name, item in value.items()}
        return value if len(self) == before else made

    def back_in(self, value: Any) -> Any:
        """The JSON value with the texts again, whose lists and objects it changes."""
        texts = self._texts
        if not texts:
            return value
        whole = [value]
        left: list[Any] = [whole]
        while left:
            if isinstance(found := left.pop(), dict):
                if any(name in texts for name in found):
                    items = [(texts.get(name, name), item) for name, item in found.items()]
                    found.clear()
                    found.update(items)
                places: Any = found.items()
            else:
                places = enumerate(found)
            for place, item in places:
                if isinstance(item, str):
                    if len(item) < LONG and item in texts:
                        found[place] = texts[item]
                elif isinstance(item, list | dict):
                    left.append(item)
        return whole[0]


def slices(text: str, first: int = 0) -> Iterator[str]:
    """The text from a character on, in parts."""
    return (text[start : start + SLICE] for start in range(first, len(text), SLICE))


def first_wrong_byte(body: bytes | bytearray) -> int | None:
    """The place of the first byte that is not UTF-8; None if the whole body is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(body), SLICE):
        held = len(decoder.getstate()[0])  # the beginning of a character that the slice before cut
        try:
            decoder.decode(body[start : start + SLICE], final=start + SLICE >= len(body))
        except UnicodeDecodeError as exc:
            return start - held + exc.start
    return None


def decode_base64(text: str, start: int = 0) -> bytes:
    """The data of a text in base64 from a character on, decoded in parts. Raises ValueError."""
    data, rest, is_ended = bytearray(), b"", False
    for part in slices(text, start):
        rest += part.encode("ascii").translate(None, b" \t\r\n\v\f")
        if is_ended and rest:
            raise binascii.Error("there is something behind its end")
        end = len(rest) // 4 * 4
        whole, rest = rest[:end], rest[end:]
        data += base64.b64decode(whole, validate=True)
        is_ended = is_ended or whole.endswith(b"=")
    if rest:
        raise binascii.Error("it is cut off")
    return cast(bytes, data)  # a copy would double the memory


def long_strings(body: bytes | bytearray) -> Iterator[range]:
    """The bytes inside of the quotes of each long string in JSON."""
    # a long string fills at least one slice, so only the first and the last quote of a slice matter
    start, begin, is_inside = 0, 0, False
    while start < len(body):
        stop = min(len(body), start + SLICE)
        part = body[start:stop]
        if (len(part) - len(part.rstrip(b"\\"))) % 2 and stop < len(body):  # the last one escapes the next byte
            stop += 1
            part = body[start:stop]
        if b'"' in part and b"\\" in part:
            part = part.replace(b"\\\\", b"..").replace(b'\\"', b"..")
        if quotes := part.count(b'"'):
            first = start + part.find(b'"')
            if is_inside and first - begin >= LONG:
                yield range(begin, first)
            begin = start + part.rfind(b'"') + 1
            is_inside ^= bool(quotes % 2)
        start = stop


def decode_long(body: bytes | bytearray, strings: Iterable[range]) -> Any:
    """Decode JSON. strings: its long ones. Raises the errors of msgspec."""
    rest, moved, long = bytearray(), list[tuple[int, int]](), LongTexts()
    end = 0
    for start, stop in ((one.start, one.stop) for one in strings):
        rest += body[end:start]
        rest += long.take(_decoded(body, start, stop)).encode()
        moved.append((len(rest), stop - len(rest)))
        end = stop
    rest += body[end:]
    try:
        return long.back_in(msgspec.json.decode(rest))
    except msgspec.DecodeError as exc:
        raise msgspec.DecodeError(_with_place(str(exc), moved)) from exc


def json_parts(value: Any, **options: Any) -> Iterator[str]:
    """The text of json.dumps with these options, in parts."""
    long = LongTexts()
    end = 0
    dumped = json.dumps(long.out_of(value), **options)
    for found in re.finditer(rf"{long.mark}\.(\d+)", dumped) if len(long) else ():
        yield dumped[end : found.start()]
        yield from (json.dumps(part, **options)[1:-1] for part in slices(long[int(found[1])]))
        end = found.end()
    yield dumped[end:]


def json_size(value: Any) -> int:
    """How many bytes a value has as JSON; an escape in a long text counts as the character that it stands for. Raises
    RecursionError, and UnicodeEncodeError for a lone surrogate."""
    long = LongTexts()
    size = len(msgspec.json.encode(long.out_of(value)))
    return size + sum(len(part.encode()) for index in range(len(long)) for part in slices(long[index]))


def _decoded(body: bytes | bytearray, start: int, stop: int) -> str:
    """The text of a string."""
    text = ""
    # a text that only one variable refers to grows in place; a `while` loop would copy it each time in Python 3.11
    for part in _slices_of(body, start, stop):
        try:
            text += msgspec.json.decode(b'"%b"%b' % (bytes(body[part.start : part.stop]), _PADDING), type=str)
        except msgspec.DecodeError as exc:
            raise msgspec.DecodeError(_with_place(str(exc), [(0, part.start - 1)])) from exc
    return text


def _slices_of(body: bytes | bytearray, start: int, stop: int) -> Iterator[range]:
    while start < stop:
        end = _cut(body, start, min(stop, start + SLICE), stop)
        yield range(start, end)
        start = end


def _cut(body: bytes | bytearray, start: int, end: int, stop: int) -> int:
    """Where a slice of a string ends: at `end`, or some bytes before, where no escape or character is cut."""
    if end == stop:
        return end
    edge = max(start, end - _PAIR)
    for place in range(edge, end):
        if body[place] == _BACKSLASH and _CUT_ESCAPE.fullmatch(body, place, end):
            run = body[start:place]
            if (len(run) - len(run.rstrip(b"\\"))) % 2 == 0:  # else another backslash escapes this one
                return place
    while end > edge and body[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _with_place(message: str, moved: Sequence[tuple[int, int]]) -> str:
    """The message of an error with the place where its byte was before. moved: (from which byte on, by how many)."""

    def before(at: re.Match[str]) -> str:
        place = int(at[1])
        return f"(byte {place + next((by for first, by in reversed(moved) if first <= place), 0)})"

    return _BYTE.sub(before, message)

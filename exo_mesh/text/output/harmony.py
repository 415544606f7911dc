"""Reads Harmony, the format of gpt-oss: messages with a header that names their channel and recipient. Pure.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`. The prompt ends with
`<|start|>assistant`, so an answer begins inside a header. Format: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re

import msgspec

from exo_mesh.text.output.json_text import read_object
from exo_mesh.text.output.reader import Malformed, More, Reader, markers
from exo_mesh.text.output.tools import Schemas
from exo_mesh.text.output.writer import EventWriter

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKERS = (CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS)

_ALL = markers(*HARMONY_MARKERS)
_BODY_ENDS = markers(*ENDS, START, CHANNEL)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class _MessageHeader(msgspec.Struct, frozen=True):
    """The channel and the recipient of a message; "" if it has none."""

    channel: str
    recipient: str


class HarmonyReading:
    """Reads one answer: messages to the user are text, analysis is reasoning, messages to functions are calls."""

    def __init__(self, reader: Reader, writer: EventWriter, schemas: Schemas) -> None:
        self._reader = reader
        self._writer = writer
        self._schemas = schemas

    def read(self) -> More[None]:
        """Read the whole answer."""
        following = yield from self._reader.space()
        marker = CHANNEL if following == "<" or (yield from self._reader.accept("to=")) else MESSAGE
        if marker == CHANNEL:
            is_recipient = following != "<"
            marker = yield from self._read_message("to=" if is_recipient else "")
        else:
            marker = yield from self._read_body(_MessageHeader("final", ""))
        while marker:
            if marker in (START, CHANNEL):
                marker = yield from self._read_message(marker)
            else:
                marker = yield from self._reader.until(_ALL, self._writer.text)
                self._writer.marker()

    def _read_message(self, header: str) -> More[str]:
        """Read one message. header: the part of its header that was already read. Returns the marker that ends the
        message, or "" at the end of the answer."""
        parts = [header]
        while (marker := (yield from self._reader.until(_ALL, parts.append))) not in (MESSAGE, ""):
            parts.append(f" {marker} ")
        found = _RECIPIENT.search("".join(parts))
        channel = "".join(parts).partition(CHANNEL)[2].split()
        header_found = _MessageHeader(channel[0] if channel else "", found.group(1) if found else "")
        self._writer.marker(in_reasoning=header_found.channel == "analysis")
        if not marker:
            return ""
        return (yield from self._read_body(header_found))

    def _read_body(self, header: _MessageHeader) -> More[str]:
        name = header.recipient.removeprefix("functions.")
        is_function = header.recipient.startswith("functions.") or name in self._schemas.names
        if is_function and self._schemas.names:
            return (yield from self._read_call(name))
        in_reasoning = header.channel == "analysis" or (bool(name) and not is_function)
        marker = yield from self._reader.until(
            _BODY_ENDS, self._writer.reasoning if in_reasoning else self._writer.text
        )
        self._writer.marker(in_reasoning=in_reasoning)
        return marker

    def _read_call(self, name: str) -> More[str]:
        """Read the arguments of a call. If they are not a JSON object they become text. Returns the end marker."""
        self._reader.record()
        try:
            following = yield from self._reader.space()
            if following != "{" or not name:
                raise Malformed
            self._writer.begin(name)
            yield from read_object(self._reader, self._writer.arguments)
            self._writer.end()
        except Malformed:
            if self._writer.in_call:
                self._writer.end()
            elif (text := self._reader.recorded()) is not None:
                self._writer.text(text)
                return (yield from self._reader.until(_BODY_ENDS, self._writer.text))
        marker = yield from self._reader.until(_BODY_ENDS, lambda _: None)
        self._writer.marker()
        return marker

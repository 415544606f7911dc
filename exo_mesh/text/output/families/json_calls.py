"""Reads tool calls as JSON: `{"name": "f", "arguments": {…}}`, alone or in an array. Pure."""

from __future__ import annotations

from collections.abc import Collection

from exo_mesh.text.output.json_text import decode, encode, is_sendable, read_object, read_value, read_whole_value
from exo_mesh.text.output.reader import Malformed, More, Reader
from exo_mesh.text.output.writer import EventWriter

NAME_KEYS = frozenset({"name", "tool_name"})
ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})
FUNCTION_KEYS = frozenset({"function"})


def read_json_calls(reader: Reader, writer: EventWriter, known: Collection[str] | None = None) -> More[None]:
    """Read one call, or a non-empty array of calls. Raises Malformed."""
    if (yield from reader.space()) != "[":
        yield from read_json_call(reader, writer, known)
        return
    reader.take(1)
    if (yield from reader.space()) != "{":
        raise Malformed
    while (yield from reader.space()) == "{":
        yield from read_json_call(reader, writer, known)
        if (yield from reader.space()) == ",":
            reader.take(1)
    yield from reader.expect("]")


def read_json_call(reader: Reader, writer: EventWriter, known: Collection[str] | None = None) -> More[None]:
    """Read one object with a name and arguments, in any order. known: if given, the name must be one of these, and the
    arguments must not be missing. Raises Malformed."""
    call = _JsonCall(reader, writer, known)
    yield from call.read()
    call.finish()


class _JsonCall:
    """Reads the members of one call. Arguments after the name are passed on as they arrive."""

    def __init__(self, reader: Reader, writer: EventWriter, known: Collection[str] | None) -> None:
        self._reader = reader
        self._writer = writer
        self._known = known
        self._name: str | None = None
        self._arguments: str | None = None
        self._is_done = False
        self._is_nested = False

    def read(self) -> More[None]:
        """Read the object of a call. A nested `"function": {…}`, as OpenAI writes calls, is read in the same way."""
        if (yield from self._reader.space()) != "{":
            raise Malformed
        self._reader.take(1)
        while (yield from self._reader.space()) != "}":
            key = yield from read_whole_value(self._reader)
            if not isinstance(key, str):
                raise Malformed
            yield from self._reader.space()
            yield from self._reader.expect(":")
            yield from self._member(key)
            if (yield from self._reader.space()) == ",":
                self._reader.take(1)
        self._reader.take(1)

    def _member(self, key: str) -> More[None]:
        following = yield from self._reader.space()
        if key in FUNCTION_KEYS and following == "{" and not self._is_nested:
            self._is_nested = True
            yield from self.read()
        elif key in NAME_KEYS or (key in FUNCTION_KEYS and self._name is None):
            self._name = yield from read_whole_value(self._reader)
            if not isinstance(self._name, str) or (self._known is not None and self._name not in self._known):
                raise Malformed
            self._start_held()
        elif key in ARGUMENTS_KEYS and not self._is_done:
            yield from self._read_arguments(following)
        else:
            yield from read_value(self._reader, lambda _: None)

    def _read_arguments(self, following: str) -> More[None]:
        if self._name is not None and following == "{":
            self._begin()
            yield from read_object(self._reader, self._writer.arguments)
            self._is_done = True
            return
        parts: list[str] = []
        yield from read_value(self._reader, parts.append)
        self._arguments = _as_object("".join(parts))
        self._start_held()

    def _start_held(self) -> None:
        """Write the call if both its name and its held arguments are known."""
        if self._name is not None and self._arguments is not None and not self._is_done:
            self._begin()
            self._writer.arguments(self._arguments)
            self._is_done = True

    def _begin(self) -> None:
        if not self._name or not is_sendable(self._name):
            raise Malformed
        self._writer.begin(self._name)

    def finish(self) -> None:
        """End the call after its object. A call without arguments gets `{}`. Raises Malformed."""
        if not self._is_done:
            if self._known is not None:
                raise Malformed
            self._begin()
            self._writer.arguments("{}")
        self._writer.end()


def _as_object(text: str) -> str:
    """Convert arguments (an object, null, or an object in a string) to the text of a JSON object. Raises Malformed."""
    value = decode(text)
    if isinstance(value, str):
        text, value = value, decode(value)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Malformed
    if text.startswith("{") and is_sendable(text):
        return text
    try:
        return encode(value)
    except ValueError as exc:
        raise Malformed from exc

"""Reads server-sent events from the bytes of a stream."""

from __future__ import annotations

import msgspec

from exo_mesh.errors import EngineError

MAX_EVENT_BYTES = 1 << 20
"""Longest line and longest event; a piece of an answer has some hundred bytes."""

_IGNORED = (b"id", b"retry")


class StreamEvent(msgspec.Struct, frozen=True):
    """One event. is_error: the server sent it in a field or an event that is called "error"."""

    data: str
    is_error: bool = False


class EventReader:
    """Cuts a stream of bytes into events, wherever its parts were cut. Holds at most max_event_bytes.

    Lines end with LF or CR LF. Comments are dropped. Raises EngineError for a line or an event that is too long, for
    bytes that are not UTF-8, and for a line that belongs to no event.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_event_bytes
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._num_data_bytes = 0
        self._is_error = False

    def feed(self, chunk: bytes) -> list[StreamEvent]:
        """The events that this part of the stream completes."""
        self._rest += chunk
        *lines, rest = self._rest.split(b"\n")
        self._rest = bytearray(rest)
        events = [event for line in lines if (event := self._line(bytes(line).removesuffix(b"\r"))) is not None]
        self._bound(len(self._rest))
        return events

    def _line(self, line: bytes) -> StreamEvent | None:
        if not line:
            return self._end()
        self._bound(len(line))
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field in (b"data", b"error"):
            self._bound(self._num_data_bytes + len(value))
            self._data.append(value)
            self._num_data_bytes += len(value)
            self._is_error |= field == b"error"
        elif field == b"event":
            self._is_error |= value == b"error"
        elif field and field not in _IGNORED:
            raise EngineError(f"the server sent a line that belongs to no event: {line[:80]!r}")
        return None

    def _end(self) -> StreamEvent | None:
        """The event that an empty line completes; None if it had no data."""
        data, is_error = b"\n".join(self._data), self._is_error
        has_data = bool(self._data)
        self._data, self._num_data_bytes, self._is_error = [], 0, False
        if not has_data:
            return None
        try:
            return StreamEvent(data.decode(), is_error)
        except UnicodeDecodeError as exc:
            raise EngineError("the server sent an event that is not UTF-8 text") from exc

    def _bound(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise EngineError(f"the server sent an event of more than {self._max_bytes} bytes")

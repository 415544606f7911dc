"""Defines a family of tool calls: the markers around its calls and the reader of the text between them. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from exo_mesh.text.output.reader import More, Reader
from exo_mesh.text.output.tools import Schemas
from exo_mesh.text.output.writer import EventWriter

ReadCalls = Callable[[Reader, EventWriter, Schemas, str], More[None]]
"""Reads the text after the start marker, which is the last argument, and writes the calls. Raises Malformed."""


class ToolFamily(msgspec.Struct, frozen=True):
    """One way of writing tool calls."""

    name: str
    starts: tuple[str, ...]
    """Markers that begin one call or a section of calls."""
    inner: tuple[str, ...]
    """The markers that end a call or stand inside it; outside a call they are dropped."""
    read: ReadCalls
    bare_starts: str = ""
    """First characters of an answer that may be a call without any marker."""
    ends_reasoning: bool = False
    """Whether a start marker also ends reasoning: true if the marker is a token that ordinary text never contains."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.starts, *self.inner)

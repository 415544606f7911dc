"""What a family of tool calls is: the markers around its calls, and the reader of what stands between them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exo_mesh.text.output.reader import More, Reader
from exo_mesh.text.output.tools import Schemas
from exo_mesh.text.output.writer import EventWriter

ReadCalls = Callable[[Reader, EventWriter, Schemas, str], More[None]]
"""Reads what follows the start marker, which is its last argument, and writes the calls. Raises Malformed."""


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """One way of writing tool calls."""

    name: str
    starts: tuple[str, ...]
    """Markers that begin one call or a section of calls."""
    inner: tuple[str, ...]
    """The other markers, which end a call or stand inside: alone in the answer, they are dropped."""
    read: ReadCalls
    bare_starts: str = ""
    """Characters with which an answer may begin that is a call without any marker."""
    ends_reasoning: bool = False
    """Whether a start marker also ends a thought: true where the marker is a token that ordinary text never gives."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.starts, *self.inner)

"""Separates the reasoning that a model writes between <think> and </think> from its answer. Pure."""

from __future__ import annotations

from enum import Enum, auto

from exo_mesh.domain.whole.text_pieces import PieceKind

START, END = "<think>", "</think>"


class _Place(Enum):
    BEFORE = auto()
    """Nothing but white space has come."""
    REASONING = auto()
    AFTER = auto()
    """Reasoning has ended, and no text of the answer has come."""
    ANSWER = auto()


class ThoughtSplitter:
    """Splits the text of an answer into reasoning and answer; the result does not depend on how the text was cut.

    Reasoning comes first or not at all: a later <think> is text. White space around the reasoning is dropped.
    """

    def __init__(self) -> None:
        self._place = _Place.BEFORE
        self._held = ""
        self._has_thought = False

    def push(self, text: str) -> list[tuple[PieceKind, str]]:
        """Take more text and return the certain pieces. Text that may become a marker is held back."""
        pieces: list[tuple[PieceKind, str]] = []
        pending = self._held + text
        self._held = ""
        while pending:
            pending = self._step(pending, pieces)
        return pieces

    def flush(self) -> list[tuple[PieceKind, str]]:
        """End the answer and return what was held back."""
        held, self._held = self._held, ""
        if self._place in (_Place.BEFORE, _Place.AFTER) and not held.strip():
            return [("text", held)] if held and self._place is _Place.BEFORE else []
        if self._place is _Place.REASONING:
            held = held.rstrip()
            return [("reasoning", held)] if held else []
        return [("text", held)] if held else []

    def _step(self, pending: str, pieces: list[tuple[PieceKind, str]]) -> str:
        """Handle the beginning of `pending` and return the rest; "" if more text is needed."""
        if self._place is _Place.BEFORE:
            return self._begin(pending)
        if self._place is _Place.REASONING:
            return self._reason(pending, pieces)
        if self._place is _Place.AFTER:
            pending = pending.lstrip()
            self._place = _Place.ANSWER if pending else _Place.AFTER
            return pending
        pieces.append(("text", pending))
        return ""

    def _begin(self, pending: str) -> str:
        begun = pending.lstrip()
        if begun.startswith(START):
            self._place = _Place.REASONING
            return begun[len(START) :]
        if START.startswith(begun):
            self._held = pending
            return ""
        self._place = _Place.ANSWER
        return pending

    def _reason(self, pending: str, pieces: list[tuple[PieceKind, str]]) -> str:
        if not self._has_thought:
            pending = pending.lstrip()
        thought, marker, rest = pending.partition(END)
        if marker:
            self._place = _Place.AFTER
            if thought := thought.rstrip():
                pieces.append(("reasoning", thought))
            return rest
        safe = len(pending) - _overlap(pending)
        safe = len(pending[:safe].rstrip())
        if safe:
            self._has_thought = True
            pieces.append(("reasoning", pending[:safe]))
        self._held = pending[safe:]
        return ""


def _overlap(text: str) -> int:
    """Length of the longest suffix of text that is a proper prefix of END."""
    for length in range(min(len(text), len(END) - 1), 0, -1):
        if text.endswith(END[:length]):
            return length
    return 0

"""Walks over the texts of one request, and marks the control tokens that they spell: see control_text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any


class TextGuard:
    """Marks the texts of one request. mark: what was put into them; "" while no text needed it."""

    def __init__(
        self,
        marked: Callable[[str, str, Collection[str]], str] | None = None,
        mark: str = "",
        allowed: Collection[str] = (),
    ) -> None:
        """marked: see ControlTexts.marked; None leaves all texts as they are. mark: random digits. allowed: markers
        that a message of the assistant may have, because the model writes them itself."""
        self._marked = marked
        self._mark = mark
        self._allowed = allowed
        self.mark = ""

    def text(self, text: str, *, is_assistant: bool = False) -> str:
        """The text, marked where that is necessary. It blocks. Raises the errors of `marked`."""
        if self._marked is None or not text:
            return text
        made = self._marked(text, self._mark, self._allowed if is_assistant else ())
        if made != text:
            self.mark = self._mark
        return made

    def value(self, value: Any) -> Any:
        """A JSON value with all its texts marked, also the names of its fields."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.value(name): self.value(item) for name, item in value.items()}
        return [self.value(item) for item in value] if isinstance(value, list) else value

"""Reads what a person types: with line editing, history and completion, and messages of several lines."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from exo_mesh.cli.chat.history import QuestionHistory

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
MAX_COMPLETIONS = 100

Complete = Callable[[str, str], Iterable[str]]
"""(the line up to the cursor, the word that is completed) to the words that may stand there."""


class LineReader:
    """Reads one message at a time. readline is only used where both ends are terminals; a pipe is read as it is."""

    def __init__(self, history: QuestionHistory, complete: Complete) -> None:
        self._history = history
        self.keeps_history = True
        self._readline = _readline() if sys.stdin.isatty() and sys.stdout.isatty() else None
        if self._readline is not None:
            self._prepare(self._readline, complete)

    def read(self) -> str:
        """The next message. Raises EOFError at Ctrl-D, and KeyboardInterrupt at Ctrl-C, which drops what was typed.

        A message has several lines if they were pasted, or if it begins with three quotes: then it ends with three.
        """
        first = input(PROMPT)
        text = first.strip()
        if text.startswith(QUOTES):
            text = self._rest_of(text[len(QUOTES) :]).strip()
        self._keep(text if first[:1] != " " else "")
        return text

    def _rest_of(self, begin: str) -> str:
        lines = [begin]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(input(MORE))
        lines[-1] = lines[-1].rstrip()[: -len(QUOTES)]
        return "\n".join(lines)

    def _keep(self, text: str) -> None:
        if not text or self._readline is None or not self.keeps_history:
            return
        self._readline.add_history(text)
        self._history.add(text)

    def _prepare(self, readline: Any, complete: Complete) -> None:
        found: list[str] = []

        def completer(word: str, number: int) -> str | None:
            if number == 0:
                line = readline.get_line_buffer()[: readline.get_endidx()]
                found[:] = [text for text in complete(line, word) if text.startswith(word)][:MAX_COMPLETIONS]
                if len(found) == 1:
                    found[0] += " "
            return found[number] if number < len(found) else None

        readline.set_completer(completer)
        readline.set_completer_delims(" \t\n")
        readline.set_auto_history(False)
        if "libedit" in (readline.__doc__ or ""):
            readline.parse_and_bind("bind ^I rl_complete")
        else:
            readline.parse_and_bind("tab: complete")
            readline.parse_and_bind(
                "set enable-bracketed-paste on"
            )  # pasted lines are one message; Python turns it off
        readline.clear_history()
        for entry in self._history.entries():
            readline.add_history(entry)


def _readline() -> Any:
    with contextlib.suppress(ImportError):
        import readline

        return readline
    return None

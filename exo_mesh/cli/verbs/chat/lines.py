"""Reads messages from the terminal: line editing, history, completion, and messages of several lines."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from exo_mesh.cli.verbs.chat.history import QuestionHistory

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
MAX_COMPLETIONS = 100

Complete = Callable[[str, str], Iterable[str]]
"""Takes the line up to the cursor and the word to complete; returns the possible words."""


class LineReader:
    """Reads one message at a time. Uses readline only if input and output are terminals; else reads plain lines."""

    def __init__(self, history: QuestionHistory, complete: Complete) -> None:
        self._history = history
        self.keeps_history = True
        self._readline = _readline() if sys.stdin.isatty() and sys.stdout.isatty() else None
        if self._readline is not None:
            self._prepare(self._readline, complete)

    def read(self) -> str:
        """Reads the next message. Raises EOFError at Ctrl-D, and KeyboardInterrupt at Ctrl-C, which discards the line.

        A message may have several lines: pasted ones, or lines between three quotes and three quotes.
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
            )  # so that pasted lines are one message; Python turns it off
        readline.clear_history()
        for entry in self._history.entries():
            readline.add_history(entry)


def _readline() -> Any:
    with contextlib.suppress(ImportError):
        import readline

        return readline
    return None

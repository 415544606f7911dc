"""Shows streamed markdown in a terminal: prints each complete block once, and redraws the last one as it grows."""

from __future__ import annotations

import time

from markdown_it import MarkdownIt
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments
from rich.text import Text

from exo_mesh.base.printable import escaped
from exo_mesh.cli.verbs.chat.blocks import finished_length

REDRAW_S = 0.08
"""Minimum time between redraws: a model may write hundreds of tokens per second."""
_CODE_THEME = "ansi_dark"
"""The terminal's own 16 colours, so that code is readable on a light background, too."""


class MarkdownWriter:
    """Shows an answer piece by piece. The caller must call `end`, also after Ctrl-C."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = ""
        self._note = ""
        self._drawn_at = float("-inf")
        self._has_printed = False
        self._live: Live | None = None

    def write(self, piece: str) -> None:
        """Adds a piece; redraws at most every REDRAW_S."""
        self._rest += piece
        self._note = ""
        if time.monotonic() - self._drawn_at >= REDRAW_S:
            self._draw()
            self._drawn_at = time.monotonic()

    def note(self, text: str) -> None:
        """Shows below the answer why it pauses, until the next piece."""
        self._note = text
        self._draw()

    def end(self) -> None:
        """Prints the rest of the text."""
        self._stop()
        if self._rest.strip():
            self._print(self._rest)
        self._rest = ""

    def _draw(self) -> None:
        if finished := finished_length(self._rest):
            self._stop()
            self._print(self._rest[:finished])
            self._rest = self._rest[finished:]
        if not self._rest.strip() and not self._note:
            return
        if self._live is None:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(self._tail(), refresh=True)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _tail(self) -> RenderableType:
        """The lower part of the growing block: lines above the screen could not be redrawn."""
        block = as_block(self._rest, needs_gap=self._has_printed)
        if self._note:
            block = Group(block, Text(self._note, style="yellow"))
        lines = self._console.render_lines(block, pad=False)
        room = max(1, self._console.height - 2)
        cut = lines[-room:]
        return Segments([part for line in cut[:-1] for part in (*line, Segment.line())] + [*cut[-1]] if cut else [])

    def _print(self, text: str) -> None:
        if text.strip():
            self._console.print(as_block(text, needs_gap=self._has_printed))
            self._has_printed = True


def as_block(text: str, *, needs_gap: bool) -> RenderableType:
    """Renders markdown, with a blank line above if needs_gap. Control characters are shown, not executed."""
    shown = rendered(text)
    return Group(Text(""), shown) if needs_gap else shown


def rendered(text: str) -> Markdown:
    """Renders markdown for a terminal: HTML as text, links with their address, line breaks as the model wrote them."""
    made = Markdown("", code_theme=_CODE_THEME, hyperlinks=False)
    source = escaped(text.replace("\r\n", "\n").expandtabs(4), keep_newlines=True).strip("\n")
    made.parsed = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).parse(source)
    for token in made.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return made

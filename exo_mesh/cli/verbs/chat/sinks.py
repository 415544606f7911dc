"""Sinks that show an answer as it arrives: as markdown in a terminal, as plain text, or not at all."""

from __future__ import annotations

import sys
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from exo_mesh.base.printable import escaped
from exo_mesh.cli.client.mesh_nodes import MeshNodes
from exo_mesh.cli.verbs.models.waiting import WaitingScreen
from exo_mesh.errors import MeshError

if TYPE_CHECKING:
    from exo_mesh.cli.verbs.chat.markdown import MarkdownWriter


class SilentSink:
    """Shows nothing, for --json, which prints one object at the end. Base class; use it in a `with` for one answer."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def text(self, piece: str) -> None:
        """Takes a piece of the answer."""

    def reasoning(self, piece: str) -> None:
        """Takes a piece of the reasoning before the answer."""

    def waiting(self, what: str) -> None:
        """Takes what the answer waits for."""

    def restarted(self) -> None:
        """Discards all pieces: the answer starts again."""

    def close(self) -> None:
        """Called when the answer has ended or was stopped."""


class PlainSink(SilentSink):
    """Writes the answer's text unchanged, without its reasoning; shows waits on standard error."""

    def __init__(self, members: MeshNodes, model: str, kept: list[str], *, is_terminal: bool) -> None:
        """kept: gets the pieces of the text. is_terminal: control characters are shown, not executed."""
        self._kept = kept
        self._waiting = WaitingScreen(members, model)
        self._is_terminal = is_terminal

    def __enter__(self) -> Self:
        self._waiting.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is None or self._kept:
            self.end_line()
        self._waiting.__exit__(kind, error, trace)

    def text(self, piece: str) -> None:
        """Writes the piece at once."""
        self._kept.append(piece)
        self._waiting.end()
        sys.stdout.write(escaped(piece.expandtabs(4), keep_newlines=True) if self._is_terminal else piece)
        sys.stdout.flush()

    def waiting(self, what: str) -> None:
        """Shows a wait until the first token."""
        self._waiting.comment(what)

    def restarted(self) -> None:
        """Raises MeshError: text that was written to a pipe cannot be taken back."""
        raise MeshError("the answer was computed again and differs from the printed text; ask again")

    def close(self) -> None:
        """Ends the display of waits."""
        self._waiting.end()

    def end_line(self) -> None:
        """Prints a line break, because models do not end their last line."""
        print(flush=True)


class TerminalSink(PlainSink):
    """Shows the answer as markdown, with the model's reasoning dimmed above it."""

    def __init__(self, members: MeshNodes, model: str, kept: list[str]) -> None:
        from rich.console import Console

        from exo_mesh.cli.verbs.chat.markdown import MarkdownWriter

        super().__init__(members, model, kept, is_terminal=True)
        self._console = Console(highlight=False, soft_wrap=False)
        self._make_writer = partial(MarkdownWriter, self._console)
        self._writer: MarkdownWriter | None = None
        self._is_thinking = False

    def text(self, piece: str) -> None:
        """Draws the current block as it grows."""
        self._kept.append(piece)
        self._waiting.end()
        self._end_thoughts()
        if self._writer is None:
            self._writer = self._make_writer()
        self._writer.write(piece)

    def reasoning(self, piece: str) -> None:
        """Shows reasoning dimmed, as plain text."""
        from rich.text import Text

        self._waiting.end()
        self._end_text()
        if not self._is_thinking:
            self._is_thinking = True
            piece = piece.lstrip("\n")
        shown = escaped(piece.expandtabs(4), keep_newlines=True)
        self._console.print(Text(shown, style="dim italic"), end="", soft_wrap=True)

    def restarted(self) -> None:
        """Reports that the answer starts again, and continues below."""
        from rich.text import Text

        self._kept.clear()
        self.close()
        self._console.print(Text("(this answer is lost; another member computes it again)", style="yellow"))

    def waiting(self, what: str) -> None:
        """Shows a wait until the first token, and below the answer if it pauses."""
        if self._writer is not None:
            self._writer.note("" if what == "keep-alive" else what)
        elif not self._is_thinking:
            super().waiting(what)

    def close(self) -> None:
        """Prints the rest that was not drawn yet."""
        self._waiting.end()
        self._end_thoughts()
        self._end_text()

    def end_line(self) -> None:
        """Does nothing: blocks of markdown end with a line break."""

    def _end_thoughts(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            self._console.print("\n")

    def _end_text(self) -> None:
        if self._writer is not None:
            self._writer.end()
            self._writer = None

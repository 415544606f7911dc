"""Checks that an answer that is given a second time begins with what the client already has. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from exo_mesh.domain.whole.text_pieces import TextPiece
from exo_mesh.errors import EngineError


class Repeated:
    """The beginning of an answer, which is dropped from the answer that comes again."""

    def __init__(self, begun: Iterable[TextPiece]) -> None:
        self._left: list[TextPiece] = []
        for piece in begun:
            if not piece.text and not piece.name:
                continue
            last = self._left[-1] if self._left else None
            if last is not None and not piece.name and (last.kind, last.call) == (piece.kind, piece.call):
                self._left[-1] = replace(last, text=last.text + piece.text)
            else:
                self._left.append(piece)
        self._num_chars = sum(len(piece.text) for piece in self._left)

    @property
    def is_over(self) -> bool:
        """Whether everything that the client has came again."""
        return not self._left

    def take(self, piece: TextPiece) -> TextPiece | None:
        """The part of a piece that the client does not have; None if it has all of it. Raises EngineError if the answer
        differs from what the client has."""
        while self._left:
            if not piece.text and not piece.name:
                return None
            expected = self._left[0]
            same_place = (piece.kind, piece.call, piece.name) == (expected.kind, expected.call, expected.name)
            common = min(len(piece.text), len(expected.text))
            if not same_place or piece.text[:common] != expected.text[:common]:
                raise self.differs()
            if common < len(expected.text):
                self._left[0] = replace(expected, text=expected.text[common:], name="", call_id="")
                return None
            del self._left[0]
            piece = replace(piece, text=piece.text[common:], name="", call_id="")
            if not piece.text:
                return None
        return piece

    def differs(self) -> EngineError:
        """The error for an answer that is another one than before."""
        return EngineError(
            f"the answer cannot continue: its engine was asked again and did not repeat the {self._num_chars} "
            "characters that were sent; temperature 0 makes answers repeatable"
        )

"""The pieces of an answer as text, and a request as text on its way between peers. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

PieceKind = Literal["text", "reasoning", "call"]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The next piece of an answer.

    kind "call": a piece of the tool call number `call`, counted from 0. The first piece of a call has its name, and its
    id if the engine gives one; `text` is the next part of the arguments, which together are a JSON object.
    """

    kind: PieceKind
    text: str
    call: int = 0
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class TextUsage:
    """Tokens of a request as its engine counted them; None where it did not."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None


NO_USAGE = TextUsage()


@dataclass(frozen=True, slots=True)
class TextInput:
    """A request as text. body: a JSON object, see TextRequest.body. stops: stop strings. begun: the pieces that the
    client has already."""

    body: bytes
    stops: tuple[str, ...] = ()
    begun: tuple[TextPiece, ...] = ()


def text_of(pieces: Iterable[TextPiece], kind: PieceKind = "text") -> str:
    """The pieces of one kind, joined."""
    return "".join(piece.text for piece in pieces if piece.kind == kind)

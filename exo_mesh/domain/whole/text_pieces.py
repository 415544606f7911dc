"""The pieces of an answer as text, and a request as text on its way between peers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, get_args

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.fields import AnyText, Newer, Printable, Size

PieceKind = Literal["text", "reasoning", "call"]
MAX_STOPS = 64
MAX_CALL_ID_CHARS = 256

_Text = Annotated[str, AnyText()]


class TextPiece(msgspec.Struct, frozen=True):
    """The next piece of an answer.

    kind "call": a piece of the tool call number `call`, counted from 0. The first piece of a call has its name, and its
    id if the engine gives one; `text` is the next part of the arguments, which together are a JSON object.
    """

    kind: Annotated[PieceKind, Newer()]
    text: _Text
    call: int = 0
    call_id: Annotated[str, Printable(MAX_CALL_ID_CHARS)] = ""
    name: _Text = ""


class Respelling(msgspec.Struct, frozen=True):
    """An answer so far, which came as text, as tokens with which a ring continues it.

    The last tokens of a text depend on what follows it: ", " may be one token, but a text that ends with "," does not
    end with that token. So `ids` stop before the end of the text, and the tokens after them must begin with `spelling`.
    known: the part of the text that the client has although `ids` do not spell it. It is `spelling`, except where a
    tokenizer writes a space before the first word.
    """

    ids: tuple[int, ...]
    spelling: _Text = ""
    known: _Text = ""


class TextUsage(msgspec.Struct, frozen=True):
    """What an engine says at the end of an answer: the tokens as it counted them, None where it did not, and the stop
    string that ended the answer, "" if none did or it does not say."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    stop_string: str = ""


NO_USAGE = TextUsage()


class TextInput(msgspec.Struct, frozen=True):
    """A request as text. body: a JSON object, see TextRequest.body. stops: stop strings. begun: the pieces that the
    client has already. thinking_budget: most tokens of reasoning; None for no limit."""

    body: bytes
    stops: Annotated[tuple[_Text, ...], Size(MAX_STOPS)] = ()
    begun: tuple[TextPiece, ...] = ()
    thinking_budget: int | None = None


def rest_of(pieces: Iterable[TextPiece], known: Sequence[TextPiece]) -> list[TextPiece]:
    """The pieces after the known ones; known pieces are text and reasoning."""
    left = {kind: len(text_of(known, kind)) for kind in get_args(PieceKind)}
    found = []
    for piece in pieces:
        size = 0 if piece.kind == "call" else min(left[piece.kind], len(piece.text))
        left[piece.kind] -= size
        if size < len(piece.text) or piece.kind == "call":
            found.append(replace(piece, text=piece.text[size:]))
    return found


def text_of(pieces: Iterable[TextPiece], kind: PieceKind = "text") -> str:
    """The pieces of one kind, joined."""
    return "".join(piece.text for piece in pieces if piece.kind == kind)

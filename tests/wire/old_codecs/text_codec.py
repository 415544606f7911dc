"""Converts requests and answers as text to driver.proto and back."""

from __future__ import annotations

from typing import cast, get_args

from exo_mesh.base.printable import printable
from exo_mesh.domain.whole.text_pieces import PieceKind, Respelling, TextInput, TextPiece, TextUsage
from exo_mesh.errors import PeerVersionError
from exo_mesh.wire.proto import driver_pb2 as pb

MAX_STOPS = 64
MAX_CALL_ID_CHARS = 256


def piece_to_proto(piece: TextPiece) -> pb.TextPiece:
    return pb.TextPiece(
        kind=piece.kind, text=_bytes(piece.text), call=piece.call, call_id=piece.call_id, name=_bytes(piece.name)
    )


def piece_from_proto(message: pb.TextPiece) -> TextPiece:
    """Raises PeerVersionError for a kind that only a newer version knows, and ValueError for text that is not UTF-8."""
    if message.kind not in get_args(PieceKind):
        raise PeerVersionError(f'a piece of text has the kind "{printable(message.kind, 40)}", which is not known here')
    call_id = printable(message.call_id, MAX_CALL_ID_CHARS)
    return TextPiece(cast(PieceKind, message.kind), _text(message.text), message.call, call_id, _text(message.name))


def respelling_to_proto(respelling: Respelling) -> pb.Respelling:
    return pb.Respelling(ids=respelling.ids, spelling=_bytes(respelling.spelling), known=_bytes(respelling.known))


def respelling_from_proto(message: pb.Respelling) -> Respelling:
    """Raises ValueError for text that is not UTF-8."""
    return Respelling(tuple(message.ids), _text(message.spelling), _text(message.known))


def text_to_proto(text: TextInput) -> pb.TextInput:
    return pb.TextInput(
        body=text.body,
        stops=[_bytes(stop) for stop in text.stops],
        begun=[piece_to_proto(piece) for piece in text.begun],
        thinking_budget=text.thinking_budget,
    )


def text_from_proto(message: pb.TextInput) -> TextInput:
    """Raises ValueError for stop strings that no API lets through, and PeerVersionError."""
    if len(message.stops) > MAX_STOPS:
        raise ValueError(f"{len(message.stops)} stop strings, more than {MAX_STOPS}")
    stops = tuple(_text(stop) for stop in message.stops)
    begun = tuple(piece_from_proto(piece) for piece in message.begun)
    budget = message.thinking_budget if message.HasField("thinking_budget") else None
    return TextInput(message.body, stops, begun, budget)


def add_usage(message: pb.TokenEvent, usage: TextUsage) -> None:
    """Write what an engine says of an answer into the last event."""
    if usage.prompt_tokens is not None:
        message.prompt_tokens = usage.prompt_tokens
    if usage.output_tokens is not None:
        message.output_tokens = usage.output_tokens
    message.stop_string = _bytes(usage.stop_string)


def usage_from_proto(message: pb.TokenEvent) -> TextUsage | None:
    """What the last event says of the answer; None if it says nothing."""
    is_counted = message.HasField("prompt_tokens") or message.HasField("output_tokens")
    if not is_counted and not message.stop_string:
        return None
    return TextUsage(
        message.prompt_tokens if message.HasField("prompt_tokens") else None,
        message.output_tokens if message.HasField("output_tokens") else None,
        _text(message.stop_string),
    )


def _bytes(text: str) -> bytes:
    # JSON may carry half of a surrogate pair, which must survive the way to the engine and back
    return text.encode("utf-8", "surrogatepass")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")

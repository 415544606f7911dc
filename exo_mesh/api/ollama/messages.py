"""Translates the messages of Ollama's clients to neutral turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from exo_mesh.api.core.call_arguments import object_of
from exo_mesh.api.core.image_inputs import image_of_base64, image_of_url
from exo_mesh.api.core.request import ImageInput, ToolCall, Turn
from exo_mesh.api.ollama.schema import OllamaMessage
from exo_mesh.errors import InputError


def turns_of(messages: Sequence[OllamaMessage]) -> tuple[Turn, ...]:
    """Translate the messages. Raises InputError that names the message and its field.

    Ollama's calls have no ids, but templates need one for each call and its result. So calls without an id are
    numbered, and a result without one belongs to the first open call of its tool, or to the first open call.
    """
    turns: list[Turn] = []
    open_calls: list[ToolCall] = []
    num_calls = 0
    for index, message in enumerate(messages):
        turn = _turn(message, f"messages[{index}]")
        calls = [
            call if call.id else replace(call, id=_numbered(num_calls + place))
            for place, call in enumerate(turn.tool_calls)
        ]
        num_calls += len(calls)
        if message.role == "tool":
            answered = _answered(turn, open_calls)
            if answered is not None:
                open_calls.remove(answered)
                turn = replace(turn, tool_call_id=turn.tool_call_id or answered.id, name=turn.name or answered.name)
        open_calls += calls
        turns.append(replace(turn, tool_calls=tuple(calls)))
    return tuple(turns)


def _turn(message: OllamaMessage, where: str) -> Turn:
    if message.tool_calls and message.role != "assistant":
        text = f"{where}.tool_calls: only messages with the role assistant may have tool calls"
        raise InputError(text, param=f"{where}.tool_calls")
    if message.tool_name and message.role != "tool":
        text = f"{where}.tool_name: only messages with the role tool may name a tool"
        raise InputError(text, param=f"{where}.tool_name")
    if message.images and message.role != "user":
        text = f"{where}.images: only messages with the role user may have images"
        raise InputError(text, param=f"{where}.images")
    calls = tuple(
        ToolCall(call.id or "", call.function.name, object_of(call.function.arguments))
        for call in message.tool_calls or ()
    )
    return Turn(
        message.role,
        message.content or "",
        where,
        message.tool_name or None,
        calls,
        (message.tool_call_id or None) if message.role == "tool" else None,
        message.thinking or None,
        parts=parts_of(message.content, message.images, where),
    )


def parts_of(text: str | None, images: Sequence[str] | None, where: str) -> tuple[str | ImageInput, ...]:
    """The images of a message in base64 and then its text, as in Ollama; () without images. Raises InputError."""
    if not images:
        return ()
    found = [_image(image, f"{where}.images[{index}]") for index, image in enumerate(images)]
    return (*found, text) if text else tuple(found)


def _image(text: str, where: str) -> ImageInput:
    return image_of_url(text, where) if text.startswith("data:") else image_of_base64(text, where)


def _answered(turn: Turn, open_calls: Sequence[ToolCall]) -> ToolCall | None:
    """The open call whose result a message has; None if there is none."""
    for call in open_calls:
        if turn.tool_call_id is not None and call.id != turn.tool_call_id:
            continue
        if turn.tool_call_id is not None or turn.name in (None, call.name):
            return call
    return None


def _numbered(index: int) -> str:
    """The id of a call: nine letters and digits, the only form that Mistral's templates accept."""
    return f"call{index:05d}"

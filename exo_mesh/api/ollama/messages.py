"""Translates the messages of Ollama's clients to neutral turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.api.bodies.values import ValueBudget
from exo_mesh.api.core.call_arguments import object_of, with_calls_named
from exo_mesh.api.core.image_inputs import image_of_base64, image_of_url
from exo_mesh.api.core.request import ImageInput, ToolCall, Turn
from exo_mesh.api.ollama.schema import OllamaMessage
from exo_mesh.errors import InputError


def turns_of(messages: Sequence[OllamaMessage]) -> tuple[Turn, ...]:
    """Translate the messages. Raises InputError that names the message and its field. Ollama's
    calls have no ids."""
    budget = ValueBudget()
    return with_calls_named(_turn(message, f"messages[{index}]", budget) for index, message in enumerate(messages))


def _turn(message: OllamaMessage, where: str, budget: ValueBudget) -> Turn:
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
        ToolCall(call.id or "", call.function.name, object_of(call.function.arguments, budget, f"{where}.tool_calls"))
        for call in message.tool_calls or ()
    )
    return Turn(
        message.role,
        message.content or "",
        where,
        message.tool_name or (message.name if message.role == "tool" else None) or None,
        calls,
        (message.tool_call_id or None) if message.role == "tool" else None,
        message.thinking or None,
        parts=parts_of(message.content, message.images, f"{where}.images"),
    )


def parts_of(text: str | None, images: Sequence[str] | None, where: str) -> tuple[str | ImageInput, ...]:
    """The images of a message in base64 and then its text, as in Ollama; () without images. Raises InputError."""
    if not images:
        return ()
    found = [_image(image, f"{where}[{index}]") for index, image in enumerate(images)]
    return (*found, text) if text else tuple(found)


def _image(text: str, where: str) -> ImageInput:
    return image_of_url(text, where) if text.startswith("data:") else image_of_base64(text, where)

"""Reads what RKLLAMA sends: pieces of answers in each of its forms, and errors. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from exo_mesh.base.printable import printable
from exo_mesh.errors import EngineError, InputError, MeshError, ModelError, OverloadError
from exo_mesh_rkllm.tool_calls import arguments_text

MAX_CALLS = 64
"""Most tool calls of one answer."""

_ABORTED = re.compile(r"Aborted inference by Timeout \(\d+ seconds\)\. Try again\.\s*\Z")
"""What RKLLAMA writes as a token of the answer when it gives up."""
_NO_MODEL = re.compile(r"not found|failed to load model", re.IGNORECASE)
_NOT_LOADED = re.compile(r"no model is currently loaded", re.IGNORECASE)
ALREADY_LOADED = re.compile(r"already loaded", re.IGNORECASE)


class ServedCall(msgspec.Struct, frozen=True):
    """A tool call. arguments: the text of a JSON object. call_id: "" if the server gives none."""

    name: str
    arguments: str
    call_id: str = ""


class Chunk(msgspec.Struct, frozen=True):
    """A part of an answer.

    is_end: the server says that the answer ends here. was_aborted: the server gave up. is_token: the chunk counts as a
    token of the output. prompt_tokens, output_tokens: what the server has counted for the whole answer, or None.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[ServedCall, ...] = ()
    is_end: bool = False
    was_aborted: bool = False
    is_token: bool = True
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def read_chunks(line: bytes) -> tuple[Chunk, ...]:
    """The chunks in one line of a stream, or in a whole answer; () for a line without content.

    Raises EngineError for a line that is no answer, and the error that the server reports in its place.
    """
    text = line.strip()
    if text.startswith(b"data:"):
        text = text[len(b"data:") :].strip()
    if not text or text == b"[DONE]" or text.startswith((b":", b"event:", b"id:", b"retry:")):
        return ()
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise EngineError("RKLLAMA sent something that is not JSON in an answer") from exc
    if not isinstance(value, dict):
        raise EngineError("RKLLAMA sent something that is not an object in an answer")
    if "error" in value:
        raise refusal(500, value)
    try:
        return _chunks(value)
    except (AttributeError, IndexError, KeyError, TypeError) as exc:
        raise EngineError(
            f"RKLLAMA sent an answer of an unknown form, with {printable(str(list(value)), 200)}"
        ) from exc


def refusal(status: int, value: Any) -> MeshError:
    """The error for an answer that is not 200. value: the body, as JSON or as text."""
    message = value
    if isinstance(value, Mapping):
        message = value.get("error", value.get("detail", value.get("message", "")))
        message = message.get("message", "") if isinstance(message, Mapping) else message
    said = printable(str(message), 300) or f"status {status}"
    if _NO_MODEL.search(said) or status == 404:
        return ModelError(f"RKLLAMA cannot load the model: {said}")
    if status in (429, 503):
        return OverloadError(f"RKLLAMA is busy: {said}")
    if status in (400, 422) and not _NOT_LOADED.search(said):
        return InputError(f"RKLLAMA refused the request: {said}")
    return EngineError(f"RKLLAMA failed: {said}")


def is_not_loaded(error: MeshError) -> bool:
    """Whether the server refused a request because its model was unloaded, as old versions do."""
    return _NOT_LOADED.search(str(error)) is not None


def _chunks(value: Mapping[str, Any]) -> tuple[Chunk, ...]:
    if "message" in value:
        message = value["message"]
        text, thought = _text(message.get("content")), _text(message.get("thinking"))
        return (_of_ollama(value, text, thought, _calls(message.get("tool_calls"))),)
    if "response" in value:
        return (_of_ollama(value, _text(value["response"]), "", ()),)
    if "tokens" in value:
        return _of_tokens(value["tokens"])
    return (_of_choices(value),)


def _of_ollama(value: Mapping[str, Any], text: str, thought: str, calls: tuple[ServedCall, ...]) -> Chunk:
    is_end = bool(value.get("done"))
    # after a timeout the last chunk has the keys of the statistics, and null where the runtime's figures belong
    gave_up = is_end and "eval_duration" in value and value["eval_duration"] is None
    return Chunk(
        text=text,
        reasoning=thought,
        calls=calls,
        is_end=is_end,
        was_aborted=gave_up or _ABORTED.search(text) is not None,
        is_token=not is_end or bool(text),
        prompt_tokens=_count(value.get("prompt_eval_count")),
        output_tokens=_count(value.get("eval_count")),
    )


def _of_tokens(tokens: list[Any]) -> tuple[Chunk, ...]:
    if not all(isinstance(token, str) for token in tokens):
        raise EngineError("RKLLAMA sent token ids without their text, which only its own tokenizer knows: update it")
    was_aborted = _ABORTED.search("".join(tokens)) is not None
    return (*(Chunk(token, was_aborted=was_aborted) for token in tokens), Chunk(is_end=True, is_token=False))


def _of_choices(value: Mapping[str, Any]) -> Chunk:
    usage = value.get("usage") or {}
    prompt_tokens, output_tokens = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if not value["choices"]:
        return Chunk(is_token=False, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    choice = value["choices"][0]
    # chat stream, chat answer, or completion and the old form, whose text is in the choice itself
    part = choice.get("delta", choice.get("message", choice))
    text = _text(part.get("content")) or _text(part.get("text"))
    is_end = choice.get("finish_reason") is not None
    return Chunk(
        text=text,
        reasoning=_text(part.get("reasoning_content")),
        calls=_calls(part.get("tool_calls")),
        is_end=is_end,
        was_aborted=_ABORTED.search(text) is not None,
        is_token=not is_end or bool(text),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )


def _calls(calls: list[Mapping[str, Any]] | None) -> tuple[ServedCall, ...]:
    found = []
    for call in (calls or ())[:MAX_CALLS]:
        function = call["function"]
        name, arguments = _text(function["name"]), arguments_text(function.get("arguments"))
        found.append(ServedCall(name, arguments, _text(call.get("id"))))
    return tuple(found)


def _text(value: Any) -> str:
    """A text that may be missing. Raises TypeError for another value."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where a text belongs")
    return value or ""


def _count(value: Any) -> int | None:
    """A number of tokens; RKLLAMA reports 0 where it does not know."""
    return value if type(value) is int and value > 0 else None

"""Translates the error replies of model servers into errors of the mesh."""

from __future__ import annotations

import json
import re
from typing import Any

from exo_mesh.errors import (
    ContextLengthError,
    EngineError,
    InputError,
    MeshError,
    ModelError,
    OverloadError,
)

MAX_MESSAGE = 500
MAX_RETRY_S = 60.0

_TOO_LONG = re.compile(
    r"exceed_context_size|context_length_exceeded|maximum context length|exceeds? the (available |model'?s? )?context"
    r"|context (length|size|window)|longer than the model",
    re.IGNORECASE,
)
"""The words of llama-server, vLLM, SGLang, LM Studio and OpenAI for a prompt that does not fit."""

_NO_PREFILL = re.compile(r"prefill|continue_final_message|add_generation_prompt", re.IGNORECASE)


class NoPrefillError(InputError):
    """The server refuses to continue this answer, as older llama-servers do for models that think."""


def error_of_reply(status: int, body: bytes, where: str, retry_after: str = "") -> MeshError:
    """The error for a reply with this status. body: at most the beginning of it, JSON or not."""
    try:
        value: Any = json.loads(body)
    except ValueError:
        value = body.decode(errors="replace")
    return error_of_value(status, value, where, retry_after)


def error_of_value(status: int, value: object, where: str, retry_after: str = "") -> MeshError:
    """As error_of_reply, for a value that was parsed already. An unknown status makes an EngineError."""
    message, words = _message(value)
    said = f"the model server {where} says: {message}" if message else f"the model server {where} answers {status}"
    if status in (401, 403):
        return EngineError(f"{said} (status {status}); put its key into a file and name it with --openai-key-file")
    if 300 <= status < 400:
        return EngineError(
            f"the model server {where} redirects (status {status}); name the address that it redirects to"
        )
    if status in (408, 429, 503):
        return OverloadError(said, retry_after_s=_seconds(retry_after))
    if _TOO_LONG.search(words):
        return ContextLengthError(said, param="messages")
    if status in (400, 422) and _NO_PREFILL.search(words):
        return NoPrefillError(said)
    if status == 404:
        return ModelError(said)
    if 400 <= status < 500:
        return InputError(said)
    return EngineError(said)


def error_of_event(data: str, where: str) -> MeshError:
    """The error for an error that came in mid-answer. data: JSON or not."""
    try:
        value: Any = json.loads(data)
    except ValueError:
        value = data
    inner = value.get("error", value) if isinstance(value, dict) else value
    code = inner.get("code") if isinstance(inner, dict) else None
    return error_of_value(code if isinstance(code, int) and 400 <= code < 600 else 500, value, where)


def _message(value: object) -> tuple[str, str]:
    """(message for a person, all words that may tell the reason) of an error in one of its usual forms."""
    inner = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(inner, dict):
        message = inner.get("message") or inner.get("detail") or ""
        words = " ".join(str(inner.get(key, "")) for key in ("message", "detail", "type", "code"))
    else:
        message = words = inner if isinstance(inner, str) else ""
    message = " ".join(str(message).split())
    return message[:MAX_MESSAGE], words[: 4 * MAX_MESSAGE]


def _seconds(retry_after: str) -> float:
    """Seconds of a Retry-After header; 1 without, or for a date."""
    if not retry_after.isascii() or not retry_after.isdecimal():
        return 1.0
    return min(MAX_RETRY_S, max(1.0, float(retry_after[:6])))

"""Turns the chunks of an OpenAI-style stream into the pieces of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from exo_mesh.domain.request import FinishReason
from exo_mesh.domain.whole.text_pieces import NO_USAGE, TextPiece, TextUsage
from exo_mesh.errors import EngineError
from exo_mesh_openai.failures import error_of_event

MAX_CALLS = 128
"""Most tool calls of one answer."""

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
}

_REASONING_FIELDS = ("reasoning_content", "reasoning")
"""The first is what llama-server, SGLang and LM Studio send; Ollama and newer vLLMs send the second, and some both."""


class AnswerReader:
    """Reads the chunks of one answer, of /v1/chat/completions or /v1/completions. where: the server, for errors.

    finish: why the answer ended; None until a chunk says so. usage: as far as the server counted. stop_string: the one
    that ended the answer, if the server says so.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self.finish: FinishReason | None = None
        self.usage: TextUsage = NO_USAGE
        self.stop_string = ""
        self._calls: dict[int, int] = {}
        self._ids: dict[int, str] = {}
        self._named: set[int] = set()

    def read(self, data: str) -> list[TextPiece]:
        """The pieces of one chunk. Raises EngineError if it is no chunk of an answer, and the error that it reports."""
        chunk = _json_object(data)
        if chunk.get("error") is not None or chunk.get("object") == "error":
            raise error_of_event(data, self._where)
        if isinstance(usage := chunk.get("usage"), dict):
            self.usage = TextUsage(_count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")))
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            raise EngineError("the server sent a chunk without choices")
        if not choices:
            return []
        choice = choices[0]
        if not isinstance(choice, dict):
            raise EngineError("the server sent a choice that is not an object")
        pieces = [*self._pieces(choice)]
        if (reason := choice.get("finish_reason")) is not None:
            self.finish = _finish(reason)
            self._note_stop(choice, chunk)
        return pieces

    def _note_stop(self, choice: dict[str, Any], chunk: dict[str, Any]) -> None:
        """Keep the stop string that ended the answer. vLLM says "stop_reason", SGLang "matched_stop", which may also be
        the id of a token; llama-server says "stopping_word", "" for none."""
        said = choice.get("stop_reason"), choice.get("matched_stop"), chunk.get("stopping_word")
        self.stop_string = next((text for text in said if isinstance(text, str) and text), "")

    def _pieces(self, choice: dict[str, Any]) -> Iterator[TextPiece]:
        if text := _text(choice.get("text")):
            yield TextPiece("text", text)
        delta = choice.get("delta")
        if delta is None:
            return
        if not isinstance(delta, dict):
            raise EngineError("the server sent a delta that is not an object")
        if thought := next((text for name in _REASONING_FIELDS if (text := _text(delta.get(name)))), ""):
            yield TextPiece("reasoning", thought)
        if text := _text(delta.get("content")):
            yield TextPiece("text", text)
        calls = delta.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise EngineError("the server sent tool calls that are not objects")
        for position, call in enumerate(calls):
            if (piece := self._call(call, position)) is not None:
                yield piece

    def _call(self, call: dict[str, Any], position: int) -> TextPiece | None:
        """The next piece of a tool call; None if it says nothing."""
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        call_id, name = _text(call.get("id")), _text(function.get("name"))
        arguments = function.get("arguments")
        text = json.dumps(arguments) if isinstance(arguments, dict) else _text(arguments)
        given = call.get("index")
        number = self._number(given if isinstance(given, int) else position, call_id)
        if number in self._named:
            return TextPiece("call", text, number) if text else None
        if not name:
            raise EngineError("the server sent a tool call without a name")
        self._named.add(number)
        return TextPiece("call", text, number, call_id, name)

    def _number(self, index: int, call_id: str) -> int:
        """The number of the call with the server's index. Some servers give each call the index 0 and an id of its own:
        a new id under a known index begins a new call."""
        known = self._calls.get(index)
        if known is not None and (not call_id or self._ids[known] == call_id):
            return known
        number = len(self._ids)
        if number >= MAX_CALLS:
            raise EngineError(f"the server sent more than {MAX_CALLS} tool calls in one answer")
        self._calls[index], self._ids[number] = number, call_id
        return number


def _json_object(data: str) -> dict[str, Any]:
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise EngineError(f"the server sent a chunk that is not JSON ({len(data)} characters)") from exc
    if not isinstance(found, dict):
        raise EngineError("the model server sent a stream chunk that is not a JSON object")
    return found


def _text(value: object) -> str:
    """The value if it is a text; "" for null. Raises EngineError for anything else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise EngineError(f"the server sent {type(value).__name__} where a text belongs")
    return value


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _finish(reason: object) -> FinishReason:
    """Raises EngineError for a reason that leaves the answer incomplete, such as a content filter."""
    if isinstance(reason, str) and reason in _REASONS:
        return _REASONS[reason]
    raise EngineError(f"the server ended the answer with the reason {json.dumps(reason)[:60]}")

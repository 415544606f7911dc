"""Turns neutral events into Ollama's replies: lines of JSON, or one object with all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from exo_mesh.api.core.answer import Answer, AnswerStep
from exo_mesh.api.core.call_arguments import object_of
from exo_mesh.api.core.reply import Reply
from exo_mesh.api.core.token_texts import token_text
from exo_mesh.api.ollama.lines import LINES, line_frame
from exo_mesh.api.ollama.objects import (
    OllamaAnswerMessage,
    OllamaCall,
    OllamaCalledFunction,
    OllamaChat,
    OllamaGenerated,
    OllamaLogprob,
    OllamaPart,
    OllamaTopLogprob,
)
from exo_mesh.base.clock import monotonic
from exo_mesh.domain.request import TokenEvent, TokenLogprob
from exo_mesh.text.assembler import TokenSpan
from exo_mesh.text.output.events import (
    OutputEnd,
    OutputEvent,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)


class OllamaDelivery(msgspec.Struct, frozen=True):
    """How the client gets the answer. model: its name as the client wrote it. created: Unix time of the reply. began:
    when the request came, on the monotonic clock."""

    model: str
    created: float
    began: float
    shows_logprobs: bool = False


class _Gathered(msgspec.Struct):
    """What one or all steps of an answer said. reason: why the answer ended; "" if it has not."""

    texts: list[str] = msgspec.field(default_factory=list)
    thoughts: list[str] = msgspec.field(default_factory=list)
    calls: list[OllamaCall] = msgspec.field(default_factory=list)
    tokens: list[TokenSpan] = msgspec.field(default_factory=list)
    reason: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def thinking(self) -> str | UnsetType:
        return "".join(self.thoughts) or UNSET

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.thoughts or self.calls or self.tokens or self.reason)


class OllamaReply(Reply):
    """Builds one of Ollama's replies. Subclasses define where text, thinking and calls are."""

    form = LINES

    def __init__(self, answer: Answer, delivery: OllamaDelivery) -> None:
        self._answer = answer
        self._delivery = delivery
        self._open_calls: dict[int, tuple[str, str]] = {}
        self._made = monotonic()

    def whole(self, steps: Iterable[AnswerStep]) -> OllamaPart:
        return self._part(self._gathered(event for step in steps for event in step.events))

    def chunks(self, step: AnswerStep) -> list[Any]:
        found = self._gathered(step.events)
        if not found.reason:
            return [] if found.is_empty else [self._part(found)]
        # the last line has no text of its own, because some clients show only the lines before it
        reason, found.reason = found.reason, ""
        return [*([] if found.is_empty else [self._part(found)]), self._part(_Gathered(reason=reason))]

    def frame(self, chunk: Any, event_id: int | None) -> bytes:
        return line_frame(chunk)

    def waiting(self, progress: str) -> bytes:
        """A line without text: Ollama's clients read every line as JSON, so there are no comments."""
        return line_frame(self._part(_Gathered()))

    @abstractmethod
    def _part(self, found: _Gathered) -> OllamaPart:
        """One line, or the whole reply."""

    def _gathered(self, events: Iterable[OutputEvent]) -> _Gathered:
        found = _Gathered()
        for event in events:
            match event:
                case TextPart(text=text, tokens=tokens):
                    found.texts.append(text)
                    found.tokens += tokens if self._delivery.shows_logprobs else ()
                case ReasoningPart(text=text):
                    found.thoughts.append(text)
                case ToolCallBegin(index=index, name=name):
                    self._open_calls[index] = (name, "")
                case ToolCallArguments(index=index, text=text):
                    name, begun = self._open_calls[index]
                    self._open_calls[index] = (name, begun + text)
                case ToolCallEnd(index=index):
                    found.calls.append(self._call(index))
                case OutputEnd(reason=reason):
                    found.reason = "length" if reason == "length" else "stop"
                    found.calls += [self._call(index) for index in list(self._open_calls)]  # cut by the token limit
        return found

    def _call(self, index: int) -> OllamaCall:
        name, arguments = self._open_calls.pop(index)
        return OllamaCall(OllamaCalledFunction(name, object_of(arguments)))

    def _common(self, found: _Gathered) -> dict[str, Any]:
        """The fields of OllamaPart."""
        fields: dict[str, Any] = {
            "model": self._delivery.model,
            "created_at": rfc3339(self._delivery.created + monotonic() - self._made),  # of this line
            "done": bool(found.reason),
            "logprobs": self._logprobs(found.tokens),
        }
        return fields | self._end(found.reason) if found.reason else fields

    def _end(self, reason: str) -> dict[str, Any]:
        total_s, timings = monotonic() - self._delivery.began, self._answer.timings
        return {
            "done_reason": reason,
            "total_duration": _ns(total_s),
            "load_duration": _ns(total_s - timings.prompt_s - timings.answer_s),
            "prompt_eval_count": self._answer.num_prompt_tokens,
            "prompt_eval_duration": _ns(timings.prompt_s),
            "eval_count": self._answer.num_tokens,
            "eval_duration": _ns(timings.answer_s),
        }

    def _logprobs(self, tokens: Iterable[TokenSpan]) -> list[OllamaLogprob] | UnsetType:
        made = [
            OllamaLogprob(*self._named(token.event), [OllamaTopLogprob(*self._named(one)) for one in token.event.top])
            for token in tokens
        ]
        return made or UNSET

    def _named(self, token: TokenEvent | TokenLogprob) -> tuple[str, float, list[int]]:
        return token_text(self._answer.prepared.text, token.token_id, token.logprob)


class OllamaChatReply(OllamaReply):
    """Builds the reply of /api/chat."""

    def _part(self, found: _Gathered) -> OllamaChat:
        message = OllamaAnswerMessage(found.text, thinking=found.thinking, tool_calls=found.calls or UNSET)
        return OllamaChat(message=message, **self._common(found))


class OllamaGenerateReply(OllamaReply):
    """Builds the reply of /api/generate."""

    def _part(self, found: _Gathered) -> OllamaGenerated:
        return OllamaGenerated(response=found.text, thinking=found.thinking, **self._common(found))


def rfc3339(unix_s: float) -> str:
    """A Unix time as Ollama writes it, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))

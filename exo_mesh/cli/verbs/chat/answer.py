"""Asks a model one question over the HTTP API and measures the time of the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from exo_mesh.base.printable import counted
from exo_mesh.cli.client.api_client import ApiClient

PATH = "/v1/chat/completions"


class ChatAnswer(msgspec.Struct, frozen=True):
    """A finished answer. first_token_s and total_s count from the request; tokens_per_s leaves out the first token."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    first_token_s: float
    total_s: float
    reasoning: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: 1 / TPOT, TPOT = (E2E − TTFT) / (N − 1); 0 where it is not defined."""
        decode_s = self.total_s - self.first_token_s
        return (self.completion_tokens - 1) / decode_s if self.completion_tokens > 1 and decode_s > 0 else 0.0

    def timing(self) -> str:
        """The times in words: `64 tokens, 85.1 tokens/s, first after 0.21 s`."""
        speed = f"{self.tokens_per_s:.1f} tokens/s, " if self.tokens_per_s else ""
        return f"{counted(self.completion_tokens, 'token')}, {speed}first after {self.first_token_s:.2f} s"


class AnswerSoFar(msgspec.Struct):
    """The parts of an answer that the events of one stream have delivered so far."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    usage: dict[str, int] = msgspec.field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds the content of one event."""
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta", {})
            self.text += delta.get("content") or ""
            self.reasoning += delta.get("reasoning_content") or ""

    def answer(self, began: float, first: float | None, ended: float) -> ChatAnswer:
        """The finished answer. The times are monotonic seconds; first: of the first token, None if there was none."""
        return ChatAnswer(
            text=self.text,
            finish_reason=self.finish_reason,
            prompt_tokens=self.usage.get("prompt_tokens", 0),
            completion_tokens=self.usage.get("completion_tokens", 0),
            first_token_s=(ended if first is None else first) - began,
            total_s=ended - began,
            reasoning=self.reasoning,
        )


def body_of(model: str, messages: Sequence[Mapping[str, str]], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The request body of a streamed chat completion."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "messages": list(messages), **options, **parameters}


def ask(
    client: ApiClient,
    model: str,
    messages: Sequence[Mapping[str, str]],
    parameters: Mapping[str, Any],
    write: Callable[[str], object],
    on_comment: Callable[[str], object] | None = None,
) -> ChatAnswer:
    """Streams the answer of one node. Raises MeshError.

    write: gets each piece of text as it arrives. on_comment: gets what the request waits for before its first token.
    """
    began = time.monotonic()
    first: float | None = None
    made = AnswerSoFar()
    for event in client.stream(PATH, body_of(model, messages, parameters), on_comment):
        num_shown = len(made.text)
        made.add(event)
        if made.text or made.reasoning:
            first = first or time.monotonic()
        if piece := made.text[num_shown:]:
            write(piece)
    return made.answer(began, first, time.monotonic())

"""One question to a model over the HTTP API, with the time it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from exo_mesh.client.api_client import ApiClient


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What came back. first_token_s counts from the request; tokens_per_s is of the tokens after the first."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    first_token_s: float
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: 1 / TPOT, TPOT = (E2E − TTFT) / (N − 1); 0 where it is not defined."""
        decode_s = self.total_s - self.first_token_s
        return (self.completion_tokens - 1) / decode_s if self.completion_tokens > 1 and decode_s > 0 else 0.0

    def timing(self) -> str:
        """`64 tokens, 85.1 tokens/s, first after 0.21 s`."""
        speed = f"{self.tokens_per_s:.1f} tokens/s, " if self.tokens_per_s else ""
        return f"{self.completion_tokens} tokens, {speed}first after {self.first_token_s:.2f} s"


def ask(
    client: ApiClient,
    model: str,
    messages: list[dict[str, str]],
    parameters: dict[str, Any],
    write: Callable[[str], object],
    on_comment: Callable[[str], object] | None = None,
) -> ChatAnswer:
    """Stream the answer: `write` gets each piece of text as it comes, on_comment what is waited for before. Raises
    MeshError."""
    body = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        **parameters,
    }
    began = time.monotonic()
    first: float | None = None
    pieces: list[str] = []
    finish_reason = ""
    usage: dict[str, int] = {}
    for event in client.stream("/v1/chat/completions", body, on_comment):
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            finish_reason = choice.get("finish_reason") or finish_reason
            if piece := choice.get("delta", {}).get("content"):
                first = first or time.monotonic()
                pieces.append(piece)
                write(piece)
    ended = time.monotonic()
    return ChatAnswer(
        text="".join(pieces),
        finish_reason=finish_reason,
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        first_token_s=(first or ended) - began,
        total_s=ended - began,
    )

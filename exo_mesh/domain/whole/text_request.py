"""A request to a whole-model engine, and the events of its answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from exo_mesh.domain.request import FinishReason, SamplingParams
from exo_mesh.domain.whole.text_pieces import NO_USAGE, TextPiece, TextUsage


class TextEnd(msgspec.Struct, frozen=True):
    """The last event of an answer. reason: STOP also for an answer that ends with tool calls."""

    reason: FinishReason
    usage: TextUsage = NO_USAGE


TextEvent = TextPiece | TextEnd


class TextRequest(msgspec.Struct, frozen=True):
    """One request for a whole-model engine.

    body: what is asked, with the keys of the OpenAI chat API: either "messages" (with "tools", "tool_choice",
    "parallel_tool_calls", "response_format", "reasoning_effort" and "chat_template_kwargs" where the client gave them),
    or "prompt", a text. Of the sampling parameters it has only "seed", and only if the client named one, because
    `sampling` always has a seed; it has no limits. max_tokens: of the whole answer, with the tokens of
    `begun`, which TextUsage counts too. stops: stop strings; the answer ends before the first of them, and an engine
    may leave them to its caller. begun: the pieces that the client has already. An engine that `continues` goes on
    after them and does not repeat them; for another engine `begun` is always empty. thinking_budget: most tokens of
    reasoning; the driver keeps it, an engine need not.
    """

    request_id: str
    body: Mapping[str, Any]
    max_tokens: int
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    begun: tuple[TextPiece, ...] = ()
    thinking_budget: int | None = None

"""What the operator of a node wants for requests that say nothing of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from exo_mesh.api.core.request import Conversation, NeutralRequest, Turn

MAX_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """temperature: stronger than what the model recommends. system_prompt: for conversations without one. max_tokens:
    of answers in conversations, as far as there is room."""

    temperature: float | None = None
    system_prompt: str = ""
    max_tokens: int = MAX_TOKENS


def with_defaults(asked: NeutralRequest, defaults: RequestDefaults, *, is_unlimited: bool = False) -> NeutralRequest:
    """The request with what it leaves open. is_unlimited: the client has said that the answer has no limit."""
    if asked.sampling.temperature is None and defaults.temperature is not None:
        asked = replace(asked, sampling=replace(asked.sampling, temperature=defaults.temperature))
    if not isinstance(asked.subject, Conversation):
        return asked
    asked = replace(asked, subject=with_system_prompt(asked.subject, defaults.system_prompt))
    return asked if is_unlimited else replace(asked, default_tokens=asked.default_tokens or defaults.max_tokens)


def with_system_prompt(conversation: Conversation, text: str) -> Conversation:
    """With this text as its first message, unless there is none, or the conversation has instructions of its own."""
    if not text or any(turn.role in ("system", "developer") for turn in conversation.turns):
        return conversation
    return replace(conversation, turns=(Turn("system", text, "--system-prompt"), *conversation.turns))

"""What the settings say for requests that leave it open."""

from __future__ import annotations

from dataclasses import dataclass, replace

from exo_mesh.api.core.request import Conversation, NeutralRequest, Turn
from exo_mesh.settings.config import Settings

MAX_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """temperature: stronger than what the model recommends. system_prompt: for conversations without one. max_tokens:
    of answers in conversations, as far as there is room. model: "" for the only one that is there. keep_agent_lines:
    lines that agents put first stay there; see exo_mesh.api.core.agent_lines. trace_sample: the share of requests that
    are traced without having asked for it."""

    temperature: float | None = None
    system_prompt: str = ""
    max_tokens: int = MAX_TOKENS
    model: str = ""
    keep_agent_lines: bool = False
    trace_sample: float = 0.0

    @classmethod
    def of(cls, settings: Settings) -> RequestDefaults:
        """As settings have it."""
        return cls(
            settings.default_temp,
            settings.system_prompt,
            settings.max_generate_tokens,
            settings.default_model,
            settings.keep_agent_lines,
            settings.trace_sample,
        )


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

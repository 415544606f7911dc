"""Default values, from the settings, for fields that a request leaves out."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from exo_mesh.api.core.request import Conversation, NeutralRequest, Turn
from exo_mesh.settings.config import Settings

MAX_TOKENS = 4096


class RequestDefaults(msgspec.Struct, frozen=True):
    """Default values for requests. temperature: overrides the model's recommendation; None means no default.
    system_prompt: for conversations without one. max_tokens: for answers in conversations, if there is room for so
    many. model: "" means the only model of the mesh. keep_agent_lines: leave the changing lines of agents first; see
    exo_mesh.api.core.agent_lines. control_tokens_in_text: leave control tokens in texts; see
    exo_mesh.text.control_text. trace_sample: the share of requests without a traceparent header that is traced."""

    temperature: float | None = None
    system_prompt: str = ""
    max_tokens: int = MAX_TOKENS
    model: str = ""
    keep_agent_lines: bool = False
    control_tokens_in_text: bool = False
    trace_sample: float = 0.0

    @classmethod
    def of(cls, settings: Settings) -> RequestDefaults:
        """The defaults that these settings define."""
        return cls(
            settings.default_temp,
            settings.system_prompt,
            settings.max_generate_tokens,
            settings.default_model,
            settings.keep_agent_lines,
            settings.control_tokens_in_text,
            settings.trace_sample,
        )


def with_defaults(asked: NeutralRequest, defaults: RequestDefaults, *, is_unlimited: bool = False) -> NeutralRequest:
    """The request with its missing fields filled in. is_unlimited: the client asked for an answer without a limit."""
    if asked.sampling.temperature is None and defaults.temperature is not None:
        asked = replace(asked, sampling=replace(asked.sampling, temperature=defaults.temperature))
    if not isinstance(asked.subject, Conversation):
        return asked
    asked = replace(asked, subject=with_system_prompt(asked.subject, defaults.system_prompt))
    return asked if is_unlimited else replace(asked, default_tokens=asked.default_tokens or defaults.max_tokens)


def with_system_prompt(conversation: Conversation, text: str) -> Conversation:
    """Add the text as a first system message, unless it is "" or the conversation has its own instructions."""
    if not text or any(turn.role in ("system", "developer") for turn in conversation.turns):
        return conversation
    return replace(conversation, turns=(Turn("system", text, "--system-prompt"), *conversation.turns))

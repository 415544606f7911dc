"""Fills in the fields that a request leaves out."""

from __future__ import annotations

from msgspec.structs import replace

from exo_mesh.api.context import RequestDefaults
from exo_mesh.api.core.request import Conversation, NeutralRequest, Turn


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

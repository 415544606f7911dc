"""Requests as text for model servers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from exo_mesh.api.core.served import text_inputs
from exo_mesh.api.openai.schema import ChatBody, CompletionBody
from exo_mesh.api.openai.translate import neutral_chat, neutral_completion

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_thinking_budget_turns_thinking_on_and_goes_beside_the_text() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = neutral_chat(msgspec.convert({"messages": MESSAGES, "thinking": thinking}, ChatBody))
    (made,) = text_inputs(asked)
    body: dict[str, Any] = msgspec.json.decode(made.body)
    assert made.thinking_budget == 1024
    assert body["chat_template_kwargs"] == {"enable_thinking": True}


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize("prompt", ["chat", "completion"])
def test_only_a_seed_that_the_client_named_is_in_the_text(seed: int | None, prompt: str) -> None:
    named = {} if seed is None else {"seed": seed}
    if prompt == "chat":
        asked = neutral_chat(msgspec.convert({"messages": MESSAGES, **named}, ChatBody))
    else:
        asked = neutral_completion(msgspec.convert({"prompt": "hi", **named}, CompletionBody))
    (made,) = text_inputs(asked)
    sent: dict[str, Any] = msgspec.json.decode(made.body)
    assert sent.get("seed") == seed and ("seed" in sent) == bool(named)

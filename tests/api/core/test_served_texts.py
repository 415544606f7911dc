"""Requests as text for model servers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from exo_mesh.api.core.served import text_inputs
from exo_mesh.api.openai.schema import ChatBody, CompletionBody
from exo_mesh.api.openai.translate import neutral_chat, neutral_completion
from exo_mesh.errors import InputError

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


@pytest.mark.parametrize("said", ["", "Once"])
def test_only_words_of_the_last_message_are_a_beginning(said: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": said}]
    asked = neutral_chat(msgspec.convert({"messages": messages, "continue_final_message": True}, ChatBody))
    (made,) = text_inputs(asked)
    assert msgspec.json.decode(made.body)["messages"] == MESSAGES
    assert [piece.text for piece in made.begun] == ([said] if said else [])


def test_a_text_without_its_special_tokens_is_refused_by_name() -> None:
    """A model server puts them around each text by itself."""
    body = msgspec.convert({"prompt": "Hi", "add_special_tokens": False}, CompletionBody)
    with pytest.raises(InputError) as found:
        text_inputs(neutral_completion(body))
    assert found.value.param == "add_special_tokens"


def test_results_of_tools_go_out_in_the_order_of_their_calls() -> None:
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "look", "arguments": "{}"}} for i in range(3)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": str(i)} for i in (2, 0, 1)]
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": calls}, *results]
    (made,) = text_inputs(neutral_chat(msgspec.convert({"messages": messages}, ChatBody)))
    assert [turn["tool_call_id"] for turn in msgspec.json.decode(made.body)["messages"][-3:]] == ["c0", "c1", "c2"]


def test_a_result_of_a_tool_has_the_name_of_its_call() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1"}]
    (made,) = text_inputs(neutral_chat(msgspec.convert({"messages": messages}, ChatBody)))
    assert msgspec.json.decode(made.body)["messages"][-1]["name"] == "look"

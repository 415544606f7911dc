"""How messages of Ollama's clients become turns, and which fields without effect are accepted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from exo_mesh.api.core.neutral_fields import ANY, NeutralTable
from exo_mesh.api.ollama.lenient import IN_BODIES, IN_MESSAGES, IN_OPTIONS, decode_ollama_body
from exo_mesh.api.ollama.messages import turns_of
from exo_mesh.api.ollama.schema import OllamaChatBody, OllamaMessage
from exo_mesh.errors import InputError

USER = {"role": "user", "content": "Hi"}


def turns(*messages: dict[str, Any]) -> Any:
    return turns_of(msgspec.convert(list(messages), list[OllamaMessage]))


def calls(*names: str, **ids: str) -> dict[str, Any]:
    made = [{"function": {"name": name, "arguments": {"n": 1}}, "id": ids.get(name)} for name in names]
    return {"role": "assistant", "tool_calls": made}


def test_calls_without_ids_are_numbered_over_the_whole_conversation() -> None:
    found = turns(USER, calls("f", "g"), {"role": "tool", "content": "1", "tool_name": "f"}, calls("f"))
    ids = [call.id for turn in found for call in turn.tool_calls]
    assert ids == ["call00000", "call00001", "call00002"] and all(len(one) == 9 for one in ids)
    assert [call.arguments for call in found[1].tool_calls] == [{"n": 1}, {"n": 1}]


@pytest.mark.parametrize("field", ["tool_name", "name"])
def test_a_result_belongs_to_the_first_open_call_of_its_tool(field: str) -> None:
    results = [{"role": "tool", "content": name, field: name} for name in ("g", "f", "g")]
    found = turns(calls("f", "g", "g"), *results)
    assert [turn.tool_call_id for turn in found[1:]] == ["call00001", "call00000", "call00002"]


def test_the_tool_name_of_a_result_wins_over_its_name_and_other_names_have_no_effect() -> None:
    both = {"role": "tool", "content": "1", "tool_name": "g", "name": "f"}
    found = turns({**USER, "name": "Ann"}, {"role": "assistant", "content": "", **calls("f", "g"), "name": "x"}, both)
    assert [(turn.tool_call_id, turn.name) for turn in found] == [(None, None), (None, None), ("call00001", "g")]


def test_a_result_without_a_name_belongs_to_the_first_open_call() -> None:
    found = turns(calls("f", "g"), {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"})
    assert [(turn.tool_call_id, turn.name) for turn in found[1:]] == [("call00000", "f"), ("call00001", "g")]


def test_an_id_of_the_client_is_kept_and_an_unknown_result_stays_alone() -> None:
    found = turns(calls("f", f="mine"), {"role": "tool", "content": "1", "tool_call_id": "mine"})
    assert (found[0].tool_calls[0].id, found[1].tool_call_id, found[1].name) == ("mine", "mine", "f")
    (alone,) = turns({"role": "tool", "content": "1", "tool_name": "f"})
    assert (alone.tool_call_id, alone.name) == (None, "f")


def test_arguments_that_are_no_object_are_shown_as_written() -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"n": 2}'}}]}
    assert turns(message)[0].tool_calls[0].arguments == {"n": 2}
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{broken"}}]}
    assert turns(message)[0].tool_calls[0].arguments == {"invalid_arguments": "{broken"}


PLACES: list[tuple[NeutralTable, str]] = [(IN_BODIES, ""), (IN_OPTIONS, "options."), (IN_MESSAGES, "messages[0].")]


@pytest.mark.parametrize(("table", "where"), PLACES)
def test_each_neutral_field_is_accepted_at_its_values_and_refused_at_others(table: NeutralTable, where: str) -> None:
    def decode(name: str, value: Any) -> OllamaChatBody:
        fields = {name: value}
        body = {"": fields, "options.": {"options": fields}}.get(where, {"messages": [{**USER, **fields}]})
        return decode_ollama_body(msgspec.json.encode({"messages": [USER], **body}), OllamaChatBody)

    for name, allowed in table.items():
        for value in (None, *allowed) if allowed is not ANY else (None, 3, "x", {"a": []}):
            assert decode(name, value).messages
        if allowed is not ANY:
            with pytest.raises(InputError, match="which is not supported yet") as raised:
                decode(name, "something else")
            assert raised.value.param == where + name


@pytest.mark.parametrize("body", [b"", b"  ", b"{}"])
def test_an_empty_body_is_an_empty_object(body: bytes) -> None:
    assert decode_ollama_body(body, OllamaChatBody) == OllamaChatBody()


@pytest.mark.parametrize(
    "body", [b"[]", b"3", b'{"options": [1]}', b'{"messages": {"a": 1}}', b'{"messages": [3]}', b"{"]
)
def test_a_malformed_body_is_one_clear_error(body: bytes) -> None:
    with pytest.raises(InputError):
        decode_ollama_body(body, OllamaChatBody)
    with pytest.raises(InputError):
        decode_ollama_body(body.replace(b"{", b'{"suffix": "", ', 1), OllamaChatBody)

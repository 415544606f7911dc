"""A request for a schema or a call gets its answer: thoughts are off, or end early enough. Errors name the tool."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from exo_mesh.api.context import ApiOptions
from exo_mesh.api.core.grammar import may_think, room_for_answer
from exo_mesh.api.core.request import Thinking
from exo_mesh.domain.request import GrammarSpec, ThinkingBudget
from exo_mesh.text.output.formats import HARMONY, OutputFormat, after_reasoning
from exo_mesh.text.output.tools import Tool
from tests.api.conftest import OPEN_ADMIN
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.rings.runner.test_constraint import asked
from tests.support.held import MODEL_DIR, HeldRing, ids_of, text_of
from tests.text.output.outputs import parse
from tests.text.output.test_tool_grammars import accepts, tokenizer_with

SCHEMA = {"type": "object", "properties": {"size": {"enum": ["small", "large"]}, "ok": {"type": "boolean"}},
          "required": ["size", "ok"], "additionalProperties": False}  # fmt: skip
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture
async def demo_api() -> AsyncIterator[Served]:
    mesh = ScriptedMesh(MODEL_DIR, limit=4096)
    async with served(mesh, ApiOptions(keep_alive_s=0.05, access=OPEN_ADMIN)) as server:
        yield server


@pytest.mark.parametrize("wanted", [FORMAT, CALL])
@pytest.mark.parametrize(
    "fields", [{}, {"thinking_budget": 5}, {"thinking_budget": 5000}, {"reasoning_effort": "high"}]
)
async def test_a_thought_that_would_not_end_leaves_room_for_the_answer(
    demo_api: Served, wanted: dict[str, Any], fields: dict[str, Any]
) -> None:
    """The weights are noise, so a thought would take all tokens."""
    status, reply = await demo_api.chat(max_tokens=120, **wanted, **fields)
    assert status == 200, reply
    request = demo_api.mesh.request
    assert request.thinking is not None and request.thinking.tokens <= fields.get("thinking_budget", 100)
    ring = HeldRing()
    ring.engine.favourites = {ids_of("<think>")[0]: 1e6} if request.thinking.start_ids else {}
    text = text_of(ring.ask(request))
    parsed = parse(demo_api.mesh.text.output, text, tools=[], starts_in_reasoning=not request.thinking.start_ids)
    answer = parsed.text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    found = json.loads(answer)
    assert found.get("arguments", found)["size"] in ("small", "large"), text


OFF = [
    {"reasoning_effort": "none"},
    {"enable_thinking": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False}},
    {"think": False},
    {"thinking": {"type": "disabled"}},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
]


@pytest.mark.parametrize(("wanted", "fields"), [([FORMAT, CALL][index % 2], one) for index, one in enumerate(OFF)])
async def test_an_answer_without_reasoning_may_not_begin_with_a_thought(
    demo_api: Served, wanted: dict[str, Any], fields: dict[str, Any]
) -> None:
    status, reply = await demo_api.chat(**wanted, **fields)
    assert status == 200, reply
    request = demo_api.mesh.request
    assert request.grammar is not None and "think" not in request.grammar.text
    assert request.thinking is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"thinking": {"type": "disabled"}, "tools": [{"name": "f", "input_schema": SCHEMA}],
                          "tool_choice": {"type": "any"}, "max_tokens": 50}),
        ("/api/chat", {"think": False, "format": SCHEMA, "stream": False}),
        ("/v1/responses", {"reasoning": {"effort": "none"}, "input": "Hi",
                           "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}),
    ],
)  # fmt: skip
async def test_every_dialect_turns_thoughts_off(demo_api: Served, path: str, body: dict[str, Any]) -> None:
    said = {} if "input" in body else {"messages": [{"role": "user", "content": "Hi"}]}
    async with demo_api.http.post(path, json={"model": "exo-mesh-demo", **said, **body}) as reply:
        assert reply.status == 200, await reply.text()
    request = demo_api.mesh.request
    assert request.grammar is not None and "think" not in request.grammar.text


@pytest.mark.parametrize(
    ("thinking", "variables", "known", "expected"),
    [
        (Thinking(), {}, (), True),
        (Thinking(False), {}, (), False),
        (Thinking(None, "none"), {}, (), False),
        (Thinking(True, "none"), {}, (), True),
        (Thinking(None, "low"), {"enable_thinking": False}, (), True),
        (Thinking(), {"reasoning_effort": "none"}, (), False),
        (Thinking(False, is_asked=False), {}, ("messages",), True),
        (Thinking(False, is_asked=False), {}, ("enable_thinking",), False),
    ],
)
def test_whether_an_answer_may_begin_with_a_thought(
    thinking: Thinking, variables: dict[str, Any], known: tuple[str, ...], expected: bool
) -> None:
    assert may_think(thinking, variables, known) is expected


def test_a_thought_that_the_prompt_has_begun_ends_at_once() -> None:
    tokenizer = tokenizer_with(frozenset())
    answer = GrammarSpec("choice", '["yes"]')
    output = OutputFormat("thinks", "<think>", "</think>")
    spec = after_reasoning(output, answer, True, may_think=False)
    assert accepts(spec, tokenizer, "\n</think>\n\nyes")
    assert not accepts(spec, tokenizer, "Hm</think>yes")
    assert after_reasoning(output, answer, False, may_think=False) == answer
    final = after_reasoning(HARMONY, answer, False, may_think=False)
    assert accepts(final, tokenizer, "<|channel|>final<|message|>yes")
    assert not accepts(final, tokenizer, "<|channel|>analysis<|message|>a<|end|><|start|>assistant")


def test_a_thought_inside_a_character_ends_after_it() -> None:
    """A forced end that would cut a character waits for the rest of the character."""
    spec = GrammarSpec("lark", 'start: /é{4}/ /[a-z]*/ "</done>"')
    answers = HeldRing().ask(asked(grammar=spec, thinking=ThinkingBudget(ids_of("</done>"), 1)))
    assert text_of(answers) == "éééé</done>"


BAD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
GONE = {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}


@pytest.mark.parametrize("schema", [BAD, GONE])
@pytest.mark.parametrize(
    ("path", "tools", "more", "param"),
    [
        ("/v1/chat/completions", lambda one: {"type": "function", "function": {"name": "g", "parameters": one}},
         {"tool_choice": "required"}, "tools[1].function.parameters"),
        ("/v1/responses", lambda one: {"type": "function", "name": "g", "parameters": one},
         {"tool_choice": "required", "input": "Hi"}, "tools[1].parameters"),
        ("/v1/messages", lambda one: {"name": "g", "input_schema": one},
         {"tool_choice": {"type": "any"}, "max_tokens": 9}, "tools[1].input_schema"),
    ],
)  # fmt: skip
async def test_an_error_in_the_schema_of_a_tool_names_the_tool(
    demo_api: Served, path: str, tools: Any, more: dict[str, Any], param: str, schema: dict[str, Any]
) -> None:
    body = {"model": "exo-mesh-demo", "tools": [{**tools({"type": "object"}), **_name(tools)}, tools(schema)], **more}
    if "input" not in more:
        body["messages"] = [{"role": "user", "content": "Hi"}]
    async with demo_api.http.post(path, json=body) as reply:
        error = (await reply.json())["error"]
        assert reply.status == 400
    assert error.get("param", param) == param
    assert param in error["message"]


async def test_tools_whose_schemas_are_too_large_together_are_refused_before_they_are_analysed(
    demo_api: Served,
) -> None:
    long = {"type": "object", "properties": {f"p{i}": {"enum": list(range(1000))} for i in range(60)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": long}} for i in range(3)]
    status, reply = await demo_api.chat(tools=tools, tool_choice="required")
    assert status == 400 and reply["error"]["param"] == "tools" and "bytes" in reply["error"]["message"]
    status, reply = await demo_api.chat(tools=tools, max_tokens=1)
    assert status == 200, reply


def test_an_answer_has_room_for_the_tags_around_its_members() -> None:
    tool = Tool("f", "", SCHEMA)
    assert [tags for _, tags in room_for_answer(GrammarSpec("json_schema", json.dumps(SCHEMA)), [tool])] == [0, 2]


def _name(tools: Any) -> dict[str, Any]:
    made = tools({"type": "object"})
    return {"function": {**made["function"], "name": "f"}} if "function" in made else {"name": "f"}


ALLOWED = [
    {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "MODE", "tools": [{"type": "function", "function": {"name": "f"}}]},
    },
    {"type": "allowed_tools", "mode": "MODE", "tools": [{"type": "function", "name": "f"}]},
]


@pytest.mark.parametrize("choice", ALLOWED)
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_the_allowed_tools_are_offered_in_a_chat(demo_api: Served, choice: Any, mode: str) -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": SCHEMA}}
    wanted = json.loads(json.dumps(choice).replace("MODE", mode))
    status, reply = await demo_api.chat(tools=[other, TOOL], tool_choice=wanted)
    assert status == 200, reply
    request = demo_api.mesh.request
    prompt = demo_api.mesh.text.tokenizer.decode(list(request.prompt_ids))
    assert "f(" in prompt and "other" not in prompt
    assert (request.grammar is not None) is (mode == "required")


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "allowed_tools"}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tool_choice.allowed_tools.tools"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
            "tool_choice.tools[0]",
        ),
        ({"type": "function"}, "tool_choice.function"),
    ],
)
async def test_a_choice_among_tools_that_is_wrong_is_refused_by_its_place(
    demo_api: Served, choice: Any, param: str
) -> None:
    status, reply = await demo_api.chat(tools=[TOOL], tool_choice=choice)
    assert (status, reply["error"]["param"]) == (400, param), reply

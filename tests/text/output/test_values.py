"""Arguments that are written as bare text become the values that the tool's schema means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from exo_mesh.errors import InputError
from exo_mesh.text.grammars import lark_text
from exo_mesh.text.output.formats import OutputFormat, tool_grammar
from exo_mesh.text.output.tools import Parameters, Schemas, Tool
from tests.text.output.family_calls import glm, invoke, minicpm, qwen
from tests.text.output.outputs import events_of, joined, parse
from tests.text.output.test_schema_property import IDS, TOKENIZER, output_of

OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}

CALLS = {
    "qwen3_coder": lambda text: f"<tool_call>\n{qwen('f', a=text)}\n</tool_call>",
    "seed_oss": lambda text: f"<seed:tool_call>\n{qwen('f', a=text)}\n</seed:tool_call>",
    "minimax_m2": lambda text: f"<minimax:tool_call>\n{invoke('f', a=text)}</minimax:tool_call>",
    "minicpm5": lambda text: minicpm("f", a=text),
    "glm47": lambda text: glm("f", a=text),
    "longcat": lambda text: glm("f", "longcat_", a=text),
}


def tool_with(schema: Any, **more: Any) -> Tool:
    return Tool("f", "", {"type": "object", "properties": {"a": schema}, "required": ["a"], **more})


def read(family: str, text: str, tool: Tool) -> Any:
    parsed = parse(OutputFormat(family, tool_family=family), CALLS[family](text), tools=[tool])
    assert parsed.text == "" and len(parsed.calls) == 1
    return json.loads(parsed.calls[0][1])["a"]


@pytest.mark.parametrize("family", sorted(CALLS))
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (OPTIONAL, "5", 5),
        (OPTIONAL, "null", None),
        (OPTIONAL, "None", None),
        ({"oneOf": [{"type": "number"}, {"type": "boolean"}]}, "2.5", 2.5),
        ({"oneOf": [{"type": "number"}, {"type": "boolean"}]}, "true", True),
        ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, "5", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": [1, "1x"]}, "1x", "1x"),
        ({"const": 5}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"const": True}, "true", True),
        ({"const": {"k": [1]}}, '{"k": [1]}', {"k": [1]}),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, "", ""),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "1e3", 1000),
        ({"type": "integer"}, "9" * 5000, None),
        ({"type": "number"}, "1e-9", 1e-9),
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": ["integer", "string"]}, '"5"', "5"),
        ({"type": ["integer", "string"]}, "5 apples", "5 apples"),
        ({"type": ["boolean", "string"]}, "True", "True"),
        ({"type": "boolean"}, "True", True),
        ({"type": "array", "items": {"type": "string"}}, '["</parameter>", "</param>", "</arg_value>"]',
         ["</parameter>", "</param>", "</arg_value>"]),
        ({"type": "array"}, "['a', 1]", ["a", 1]),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "string"}]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "string"}]}, "{x", "{x"),
        ({"allOf": [{"$ref": "#/$defs/Count"}]}, "3", 3),
    ],
)  # fmt: skip
def test_a_value_has_the_type_that_the_whole_schema_says(family: str, schema: Any, text: str, value: Any) -> None:
    tool = tool_with(schema, **{"$defs": {"Point": POINT, "Count": {"type": ["integer", "null"]}}})
    if len(text) == 5000:
        calls = parse(OutputFormat(family, tool_family=family), CALLS[family](text), tools=[tool]).calls
        assert calls[0][1] == f'{{"a": {text}}}'
        return
    found = read(family, text, tool)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("family", sorted(CALLS))
def test_a_string_of_json_that_never_ends_costs_no_other_argument(family: str) -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"type": "array"}, "b": {"type": "integer"}}})
    text = CALLS[family]('["x')
    parsed = parse(OutputFormat(family, tool_family=family), text, tools=[tool])
    assert json.loads(parsed.calls[0][1]) == {"a": '["x'}


@pytest.mark.parametrize("value", ['["</parameter>", "</arg_value>", 1]', '["x</parameter></arg_value>', '"a'])
@pytest.mark.parametrize("family", ["qwen3_coder", "glm47"])
def test_a_marker_in_a_string_of_json_is_found_wherever_the_text_is_cut(family: str, value: str) -> None:
    tool, text = tool_with({"type": ["array", "number"]}), CALLS[family](value)
    whole = joined(events_of(output_of(family), [text], tools=[tool]))
    for at in range(1, len(text)):
        assert joined(events_of(output_of(family), [text[:at], text[at:]], tools=[tool])) == whole
    assert joined(events_of(output_of(family), text, tools=[tool])) == whole


def allowed(family: str, tool: Tool, text: str) -> bool:
    spec = tool_grammar(output_of(family), [tool], "required", True)
    assert spec is not None
    matcher = LLMatcher(IDS, lark_text(spec), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(TOKENIZER.encode(text).ids) and matcher.is_accepting()


@pytest.mark.parametrize("family", sorted(CALLS))
@pytest.mark.parametrize(
    ("schema", "texts", "refused"),
    [
        ({"type": "string", "maxLength": 3}, ["", "abc"], ["abcd"]),
        ({"type": "string", "pattern": "^[a-z]+$"}, ["abc"], ["", "a1"]),
        ({"type": "string", "pattern": "b"}, ["abc"], ["ac"]),
        ({"enum": ["red", "green"]}, ["red"], ["re", "redd"]),
        ({"const": "x"}, ["x"], ["y", "null"]),
        ({"type": ["string", "null"], "minLength": 5}, ["abcde", "null"], ["abc", "5"]),
        ({"type": ["boolean", "string"], "maxLength": 2}, ["true", "ab"], ["abc", "True"]),
        ({"type": ["integer", "string"], "maximum": 9}, ["9", '"10"', "a1"], ["10"]),
        (OPTIONAL, ["5", "null"], ["a", '"5"', "5.5"]),
        ({"enum": [1, 2]}, ["1"], ["3", "a"]),
        ({"$ref": "#/$defs/Point"}, ['{"x": 1}'], ["{}", "1"]),
        ({"allOf": [{"$ref": "#/$defs/Count"}, {"minimum": 3}]}, ["3", "null"], ["2"]),
    ],
)  # fmt: skip
def test_a_forced_call_keeps_its_schema(family: str, schema: Any, texts: list[str], refused: list[str]) -> None:
    tool = tool_with(schema, **{"$defs": {"Point": POINT, "Count": {"type": ["integer", "null"]}}})

    def call(text: str) -> str:
        made = CALLS[family](text)
        made = made.replace("\n</minimax", "</minimax").replace("</minimax", "\n</minimax")
        return made.replace("><param", ">\n<param").replace("</param><", "</param>\n<")

    assert [text for text in texts if not allowed(family, tool, call(text))] == []
    assert [text for text in refused if allowed(family, tool, call(text))] == []


def test_a_text_with_the_tag_that_ends_it_is_not_allowed() -> None:
    tool = tool_with({"type": "string"})
    assert allowed("qwen3_coder", tool, CALLS["qwen3_coder"]("a</parameter"))
    assert not allowed("qwen3_coder", tool, CALLS["qwen3_coder"]("a</parameter>b"))


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": None},
        {"type": "object", "properties": {}, "required": None},
        {"properties": {}},
        {"type": ["object", "null"], "properties": {}},
    ],
)
@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "glm47", "pythonic", "gemma4", "kimi_k3"])
def test_a_tool_without_parameters_is_called_without_arguments(family: str, parameters: dict[str, Any]) -> None:
    spec = tool_grammar(output_of(family), [Tool("f", "", parameters)], "required", False)
    assert spec is not None
    matcher = LLMatcher(IDS, lark_text(spec), log_level=0)
    forced: list[int] = []
    while not matcher.is_accepting() and (ids := matcher.compute_ff_tokens()):
        assert matcher.consume_tokens(ids)
        forced += ids
    if family != "kimi_k3":  # its calls have a number, which is free
        text = TOKENIZER.decode(forced)
        assert parse(output_of(family), text, tools=[Tool("f", "", parameters)]).calls == [["f", "{}"]], text


ARGUMENTS = {"$ref": "#/$defs/Arguments", "$defs": {"Arguments": {"type": "object", "properties": {"a": OPTIONAL}}}}


@pytest.mark.parametrize(
    "parameters",
    [
        ARGUMENTS,
        {"allOf": [{"type": "object", "properties": {"a": OPTIONAL}}, {"required": ["a"]}]},
        {"type": "object", "anyOf": [{"properties": {"a": OPTIONAL}, "required": ["a"]}, {"properties": {"b": {}}}]},
        {"type": "object", "required": ["a"], "properties": {"a": {"allOf": [OPTIONAL, {"not": {"type": "null"}}]}}},
    ],
)
@pytest.mark.parametrize("family", ["qwen3_coder", "minimax_m2", "glm47"])
def test_parameters_that_are_combined_at_the_root_are_known(family: str, parameters: dict[str, Any]) -> None:
    tool = Tool("f", "", parameters)
    assert read(family, "5", tool) == 5
    assert allowed("hermes", tool, '<tool_call>\n{"name": "f", "arguments": {"a": 5}}\n</tool_call>')
    assert not allowed("hermes", tool, '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>')


@pytest.mark.parametrize("name", ["from", "class", "async", "user-id", "größe"])
@pytest.mark.parametrize("family", ["pythonic", "olmo3", "llama4_pythonic"])
def test_a_parameter_may_have_the_name_of_a_keyword_of_python(family: str, name: str) -> None:
    tool = Tool("get-it", "", {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]})
    start, end = {
        "pythonic": ("<|tool_call_start|>[", "]<|tool_call_end|>"),
        "olmo3": ("<function_calls>\n", "\n</function_calls>"),
        "llama4_pythonic": ("[", "]"),
    }[family]
    text = f'{start}get-it({name}="a\\/, b=1"){end}'
    parsed = parse(output_of(family), text, tools=[tool])
    assert [call[0] for call in parsed.calls] == ["get-it"]
    assert json.loads(parsed.calls[0][1]) == {name: "a/, b=1"}
    assert allowed(family, tool, text.replace("\\/", "/"))


@pytest.mark.parametrize(
    ("family", "parameters", "what"),
    [
        ("qwen3_coder", {"properties": {"a b": {}}, "required": ["a b"]}, "the name"),
        ("glm47", {"properties": {"a": {}}, "minProperties": 1}, "minProperties"),
        ("minimax_m2", {"properties": {"a": {"const": " x"}}, "required": ["a"]}, "cannot express"),
        ("pythonic", {"properties": {"a": {"$ref": "#/$defs/no"}}}, "does not exist"),
        ("qwen3_coder", {"allOf": [False]}, "no object fits"),
        ("gemma4", {"anyOf": [{"type": "string"}]}, "no object fits"),
        ("glm47", {"properties": {"a": {"type": "string", "pattern": 5}}}, "wrong type"),
        ("glm47", {"properties": {"a": {"oneOf": [{"const": 1}, {"enum": [1, 2]}]}}}, "oneOf"),
    ],
)
def test_what_a_format_cannot_enforce_is_refused_by_its_name(family: str, parameters: Any, what: str) -> None:
    with pytest.raises(InputError, match=what):
        tool_grammar(output_of(family), [Tool("f", "", {"type": "object", **parameters})], "required", True)


@pytest.mark.parametrize(
    "more",
    [
        {"allOf": [{}] * 20_001},
        {"allOf": [{"properties": {f"a{i}": {}}} for i in range(10_001)]},
        {"anyOf": [{"$ref": "#/$defs/none"}]},
        {"$ref": "#/$defs/none"},
    ],
)
def test_a_root_that_cannot_be_analysed_hides_no_property(more: dict[str, Any]) -> None:
    """The properties together cost no more than one analysis."""
    schemas = Schemas([Tool("f", "", {"properties": {f"p{i}": {"type": "integer"} for i in range(50)}, **more})])
    found = [schemas.parameter("f", f"p{i}") for i in range(50)]
    assert all(one is not None and one.kinds == {"integer"} for one in found)


def test_a_broken_property_hides_no_other() -> None:
    properties = {"a": {"$ref": "#/$defs/none"}, "b": {"$ref": "#/$defs/x"}, "c": {"$ref": "#/properties/b"}}
    schemas = Schemas([Tool("f", "", {"properties": properties, "$defs": {"x": {"type": "boolean"}}})])
    assert schemas.parameter("f", "a") is None
    assert [one and one.kinds for one in (schemas.parameter("f", "b"), schemas.parameter("f", "c"))] == [
        {"boolean"}
    ] * 2


@pytest.mark.parametrize("others", [{}, True, {"type": "string"}])
@pytest.mark.parametrize("word", ["$ref", "allOf"])
def test_other_members_stay_allowed_behind_a_combination(word: str, others: Any) -> None:
    inner = {"type": "object", "properties": {"a": {}}, "additionalProperties": others}
    root = {"$ref": "#/$defs/x", "$defs": {"x": inner}} if word == "$ref" else {"allOf": [inner]}
    assert Parameters(Tool("f", "", root)).closed().get("additionalProperties") is not False

"""Grammars are refused with the keyword at fault, and none, however made, ends the process that checks it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exo_mesh.domain.request import GrammarKind, GrammarSpec
from exo_mesh.errors import InputError
from exo_mesh.text.grammars import MAX_BYTES, lark_of
from tests.text.checked_grammars import check_grammar


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


GOOD: list[GrammarSpec] = [
    schema({"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}, "required": ["a"]}),
    schema(True),
    schema({"type": "object"}),
    schema({"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}),
    schema({"type": "array", "minItems": 10**6, "items": {"type": "string", "maxLength": 10**9}}),
    GrammarSpec("regex", r"a/b\d+"),
    GrammarSpec("regex", "((a{100}){100}){100}"),
    GrammarSpec("choice", '["yes", "no\\"", "é\\u0000"]'),
    GrammarSpec("lark", 'start: "a" (x | %json {"type": "integer"})\nx: /[0-9]+/'),
    GrammarSpec("lark", 'start: <|im_end|> "a"'),
]


@pytest.mark.parametrize("spec", GOOD, ids=range(len(GOOD)))
def test_a_sound_grammar_passes_and_can_stand_in_another(spec: GrammarSpec) -> None:
    check_grammar(spec)
    check_grammar(GrammarSpec("lark", f"start: thought? answer\nthought: /[^<]*/\nanswer: {lark_of(spec)}"))


@pytest.mark.parametrize(
    ("value", "keyword"),
    [
        ({"not": {}}, '"not"'),
        ({"type": "object", "properties": {"a": {"if": {}, "then": {}}}}, '"if", "then"'),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, '"oneOf"'),
        ({"type": "string", "format": "foo"}, '"format"'),
        ({"type": "string", "pattern": "(?=a)b"}, '"pattern"'),
        ({"$ref": "http://example.com/a"}, '"$ref"'),
        ({"$ref": "#/nothing"}, '"$ref"'),
        ({"type": "number", "minimum": -1.5e300, "maximum": 1e301}, '"minimum"'),
        ({"type": "integer", "multipleOf": 0}, '"multipleOf"'),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength (5) is greater than maxLength (2)"),
        ({"type": "gibberish"}, "gibberish"),
    ],
)
def test_a_schema_that_cannot_be_honoured_is_refused_by_its_keyword(value: Any, keyword: str) -> None:
    with pytest.raises(InputError) as caught:
        check_grammar(schema(value), "tools")
    assert keyword in str(caught.value)
    assert caught.value.param == "tools"


def test_a_schema_inside_another_grammar_is_refused_by_its_keyword_too() -> None:
    inside = lark_of(schema({"type": "array", "uniqueItems": True}))
    with pytest.raises(InputError, match=r'cannot be enforced: "uniqueItems"$'):
        check_grammar(GrammarSpec("lark", f'start: "x"\n  | answer\nanswer: {inside}'))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{"),
        ("json_schema", "[1]"),
        ("json_schema", "false"),
        ("json_schema", '{"const": 1e400}'),
        ("json_schema", '{"const": NaN}'),
        ("json_schema", "[" * 100_000),
        ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
        ("regex", "(a"),
        ("regex", r"(a)\1"),
        ("regex", "(" * 60_000 + ")" * 60_000),
        ("lark", "start: nothing"),
        ("lark", 'begin: "a"'),
        ("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
        ("lark", 'start: "a"\0'),
        ("lark", "#" * (MAX_BYTES + 1)),
        ("regex", "\ud800"),
        ("choice", "[]"),
        ("choice", '["a", 1]'),
        ("choice", json.dumps([str(i) for i in range(5000)])),
    ],
)
def test_what_is_no_grammar_is_refused(kind: GrammarKind, text: str) -> None:
    with pytest.raises(InputError) as caught:
        check_grammar(GrammarSpec(kind, text))
    assert len(str(caught.value)) < 600


@pytest.mark.extended
def test_a_long_chain_of_rules_overflows_no_stack() -> None:
    rules = [f"a{i:x}:a{i + 1:x}" for i in range(10_000)]
    text = "start:a0\n" + "\n".join(rules) + '\na2710:"z"'
    assert len(text) < MAX_BYTES
    check_grammar(GrammarSpec("lark", text))
    links = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(2700)}
    check_grammar(schema({"$defs": {**links, "2700": {}}, "$ref": "#/$defs/0"}))

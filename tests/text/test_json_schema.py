"""A schema means the same in its standard form, which grammars and readers use."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from exo_mesh.domain.request import GrammarSpec
from exo_mesh.errors import InputError
from exo_mesh.text.json_schema import SchemaError, standard_schema
from exo_mesh.text.schema_shapes import Analysis
from exo_mesh.text.shortest import UNKNOWN, shortest_answer, shortest_json
from tests.text.checked_grammars import check_grammar
from tests.text.output.random_schemas import Schemas

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}

MANY = {"anyOf": [{"type": "object", "properties": {f"a{i}": {}}} for i in range(60)]}


def kinds(schema: dict[str, Any]) -> list[str]:
    standard = standard_schema(schema)
    return sorted(shape.kind for shape in Analysis(standard).shapes(standard))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/Point", "$defs": {"Point": POINT}},
        {"$ref": "#/definitions/Point", "definitions": {"Point": POINT}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": POINT}},
        {"$ref": "#/$defs/a~0b", "$defs": {"a~b": POINT}},
        {"$ref": "#/$defs/a%20b", "$defs": {"a b": POINT}},
        {"$ref": "#/$defs/a%25b", "$defs": {"a%b": POINT}},
        {"$ref": "#/$defs/outer/$defs/inner", "$defs": {"outer": {"$defs": {"inner": POINT}}}},
        {"$ref": "#/$defs/list/anyOf/0", "$defs": {"list": {"anyOf": [POINT]}}},
        {"$ref": "#point", "$defs": {"p": {"$anchor": "point", **POINT}}},
        {"$id": "https://example.com/root.json", "$ref": "#/$defs/p", "$defs": {"p": POINT}},
        {"$id": "https://example.com/root.json", "$ref": "root.json#/$defs/p", "$defs": {"p": POINT}},
        {"$id": "https://example.com/root.json", "$ref": "p.json", "$defs": {"p": {"$id": "p.json", **POINT}}},
        {"$ref": "#/$defs/one", "$defs": {"one": {"$ref": "#/$defs/two"}, "two": POINT}},
        {"allOf": [{"$ref": "#/$defs/p"}, {"description": "more"}], "$defs": {"p": POINT}},
    ],
)
def test_a_reference_of_any_form_is_followed(schema: dict[str, Any]) -> None:
    assert kinds(schema) == ["object"]
    assert shortest_json(schema) == '{"x": 0}'
    check_grammar(GrammarSpec("json_schema", json.dumps(schema)))


def test_a_property_with_the_name_of_a_keyword_is_a_property() -> None:
    inner = {"$ref": {"type": "string"}, "not": {"type": "null"}, "pattern": {"type": "string"}}
    schema = {"type": "object", "properties": inner, "required": ["$ref", "not"]}
    assert standard_schema(schema) == schema


@pytest.mark.parametrize("reference", ["#/$defs/none", "#nowhere", "#/properties/0"])
def test_a_reference_that_leads_nowhere_is_refused_by_its_text(reference: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(reference)):
        standard_schema({"properties": {"a": {"$ref": reference}}})
    with pytest.raises(InputError, match=r"\$ref"):
        check_grammar(GrammarSpec("json_schema", json.dumps({"properties": {"a": {"$ref": reference}}})))


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}])
def test_a_circle_of_references_alone_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        kinds(schema)


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": False}, {"minItems": 0}, {"minLength": 0}, {"minProperties": 0}, {"pattern": ""},
        {"not": False},
        {"not": {"not": {}}}, {"additionalItems": True}, {"additionalItems": False}, {"dependentRequired": {}},
        {"dependentSchemas": {}}, {"dependencies": {}}, {"if": {"type": "string"}}, {"then": {}, "else": False},
        {"unevaluatedProperties": True}, {"unevaluatedItems": {}}, {"propertyNames": {}}, {"minContains": 0},
        {"contains": {"type": "string"}, "minContains": 0}, {"required": None}, {"enum": None}, {"minLength": None},
        {"format": ""}, {"prefixItems": []}, {"allOf": []}, {"$comment": "c"}, {"maxLength": None, "title": None},
        {"patternProperties": {}}, {"contentEncoding": ""}, {"items": None}, {"additionalProperties": None},
    ],
)  # fmt: skip
def test_a_keyword_that_allows_everything_is_accepted(keywords: dict[str, Any]) -> None:
    assert standard_schema({"type": "object", "properties": {"a": keywords}})["properties"]["a"] in ({}, {"items": {}})
    check_grammar(GrammarSpec("json_schema", json.dumps({"type": "object", "properties": {"a": keywords}})))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"enum": ["a"], "nullable": True}, {"enum": ["a", None]}),
        ({"type": "string", "nullable": False}, {"type": "string"}),
        ({"type": "string", "maxLength": 3.0}, {"type": "string", "maxLength": 3}),
        ({"type": "integer", "format": "int32"}, {"type": "integer"}),
        ({"type": "object", "unevaluatedProperties": False}, {"type": "object", "additionalProperties": False}),
        ({"not": {"type": "null"}}, {"type": ["boolean", "number", "string", "array", "object"]}),
        ({"const": None}, {"const": None}),
    ],
)
def test_the_standard_form(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert standard_schema(schema) == expected
    check_grammar(GrammarSpec("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": ["integer", "null"]}, ["integer", "null"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["integer", "null"]),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "number"}]}, ["integer"]),
        ({"enum": [1, "a", None, 2.5]}, ["null", "number", "string"]),
        ({"enum": [1, "a", None], "type": "string"}, ["string"]),
        ({"const": [1]}, ["array"]),
        ({"anyOf": [{"const": 1}, {"const": "1"}], "type": "string"}, ["string"]),
        ({"type": "STRING"}, ["string"]),
        ({"type": "int"}, ["integer"]),
        ({"anyOf": []}, []),
    ],
)
def test_the_kinds_of_values_that_a_schema_allows(schema: dict[str, Any], expected: list[str]) -> None:
    assert kinds(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/p", "$defs": {"p": POINT}},
        {"allOf": [POINT]},
        {"anyOf": [POINT, {"type": "string"}]},
        {"oneOf": [POINT, {"type": "string"}]},
        {"const": 1},
        {"type": "string", "const": "a"},
        {"not": {"type": "null"}},
        {"not": {"const": None}},
        {"type": ["string", "null"]},
        {"enum": ["a", None]},
    ],
)
def test_a_nullable_value_may_be_null_beside_any_keyword(schema: dict[str, Any]) -> None:
    assert "null" in kinds({**schema, "nullable": True})


@pytest.mark.parametrize(
    ("schema", "is_kept"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, False),
        ({"oneOf": [{"type": "integer"}, {"const": 1.5}]}, False),
        ({"allOf": [{"type": "integer"}]}, False),
        ({"enum": [1, 2]}, False),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, True),
        ({"$ref": "#/$defs/p", "$defs": {"p": POINT}}, True),
        ({}, True),
    ],
)
def test_a_format_is_dropped_where_no_string_is_allowed(schema: dict[str, Any], is_kept: bool) -> None:
    assert ("format" in standard_schema({**schema, "format": "int32"})) == is_kept


@pytest.mark.parametrize(
    "more",
    [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {"description": "any", "type": "string"}},
        {"dependentRequired": {"a": []}},
    ],
)
def test_keywords_that_allow_everything_are_left_out(more: dict[str, Any]) -> None:
    assert standard_schema({"type": "object", **more}) == {"type": "object"}
    kept = {"type": "object", "dependentRequired": {"a": ["b"]}}
    assert standard_schema(kept) == kept


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"allOf": [{}] * 20_001}, id="parts"),
        pytest.param({"allOf": [{"properties": {f"a{i}": {}}} for i in range(10_001)]}, id="clauses"),
        pytest.param({"allOf": [{"$ref": "#/$defs/many"}] * 9, "$defs": {"many": MANY}}, id="alternatives"),
        pytest.param({"allOf": [{"enum": list(range(1000))}] * 1000}, id="literals"),
    ],
)
def test_the_work_of_an_analysis_is_bounded(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="too many"):
        kinds(schema)


def test_a_schema_with_too_many_alternatives_is_refused() -> None:
    one = {"anyOf": [{"minimum": number} for number in range(9)]}
    with pytest.raises(SchemaError, match="too many"):
        kinds({"allOf": [one, one, one]})


def test_no_value_of_a_schema_is_shorter_than_the_shortest() -> None:
    for seed in range(60):
        schemas = Schemas(seed)
        schema, members = schemas.parameters()
        assert len(shortest_json(schema)) <= len(json.dumps(schemas.members(members), ensure_ascii=False)), schema


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (GrammarSpec("json_schema", '{"type": "string", "minLength": 3}'), '"xxx"'),
        (GrammarSpec("json_schema", '{"type": "array", "items": {"type": "null"}, "minItems": 2}'), "[null, null]"),
        (
            GrammarSpec(
                "json_schema",
                '{"type": "array", "prefixItems": [{"const": "a"}, {"const": "bb"}, {"type": '
                '"null"}], "items": {"type": "boolean"}, "minItems": 5}',
            ),
            '["a", "bb", null, true, true]',
        ),
        (GrammarSpec("json_schema", '{"type": "integer", "minimum": 100}'), "100"),
        (GrammarSpec("json_schema", "true"), "{}"),
        (GrammarSpec("choice", '["perhaps", "no"]'), "no"),
        (GrammarSpec("regex", "[0-9]{3}-ab+"), "xxxxxx"),
        (GrammarSpec("lark", "start: X"), UNKNOWN),
        (GrammarSpec("json_schema", "{"), UNKNOWN),
    ],
)
def test_the_shortest_answer_of_each_kind_of_grammar(spec: GrammarSpec, expected: str) -> None:
    assert shortest_answer(spec) == expected


def test_a_recursive_schema_has_a_shortest_value() -> None:
    following = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    properties = {"v": {"type": "integer"}, "next": following}
    node = {"type": "object", "properties": properties, "required": ["v", "next"]}
    assert shortest_json(node) == '{"v": 0, "next": null}'
    with pytest.raises(SchemaError):
        shortest_json({**node, "properties": {"v": {}, "next": {"$ref": "#"}}})

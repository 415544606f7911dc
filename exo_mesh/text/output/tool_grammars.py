"""Builds grammars, in llguidance's Lark, that force a model to write tool calls in its family's own format. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from exo_mesh.text.output.families.arg_keys import ARG_KEY_VALUES
from exo_mesh.text.output.families.tagged import TagStyle
from exo_mesh.text.output.families.values import ValueRules
from exo_mesh.text.output.families.xml_calls import (
    DSML_STYLE,
    KIMI_K3_STYLE,
    MINICPM_STYLE,
    MINIMAX_STYLE,
    MUSE_STYLE,
    QWEN_STYLE,
)
from exo_mesh.text.output.lark_rules import LarkRules
from exo_mesh.text.output.tools import Parameters, Tool
from exo_mesh.text.output.value_grammars import (
    Place,
    UnenforceableError,
    bare_string,
    bare_value,
    check_form,
    enforceable,
)
from exo_mesh.text.schema_shapes import Form, Shape

WHOLE_MESSAGES = "whole messages of Harmony"
"""The comment that marks a grammar which also covers the headers of messages."""

MAX_CALLS = 16
"""Most calls in one answer; without a bound a poor model makes calls until its token limit."""

Members = Sequence[tuple[str, Any, bool]]
"""(name, schema, whether it is required) of each member of an object."""

_BARE_NAME = re.compile(r"[^\s<>\"']+")
_KEY = re.compile(r"[^\s<>](?:[^<>]*[^\s<>])?")
_WORD = re.compile(r"[^\s=(),\[\]{}\"'#]+")


def _arguments(rules: LarkRules, tool: Tool) -> str:
    """The arguments of a tool as JSON."""
    return rules.json(Parameters(tool).closed())


def _parameters_of(tool: Tool) -> Parameters:
    """The parameters of a tool for formats that write members one by one. Raises UnenforceableError."""
    parameters = Parameters(tool)
    if parameters.problems or not parameters.forms:
        raise UnenforceableError(next(iter(parameters.problems), "its root, which no object fits"))
    return parameters


def _forms(tool: Tool) -> tuple[Parameters, list[Members]]:
    """The sets of members that the arguments may have. Raises UnenforceableError."""
    parameters = _parameters_of(tool)
    return parameters, [_members_of(parameters, form) for form in parameters.forms]


def _members_of(parameters: Parameters, form: Form) -> Members:
    """The members of a form, without members that no value fits. Raises UnenforceableError."""
    check_form(form)
    return [member for member in form.properties if member[2] or parameters.allowed(member[1]).shapes]


def _checked_name(name: str, pattern: re.Pattern[str]) -> str:
    if not pattern.fullmatch(name):
        raise UnenforceableError(f"the name {json.dumps(name)}")
    return name


def _any_of(rules: LarkRules, calls: Sequence[str]) -> str:
    return rules.rule(" | ".join(calls))


def _repeated(rules: LarkRules, call: str, separator: str, parallel: bool) -> str:
    between = f"{rules.literal(separator)} " if separator else ""
    return f"{call} ({between}{call}){{0,{MAX_CALLS - 1}}}" if parallel else call


def _wrapped_json(
    before: str, middle: str, after: str, separator: str, rules: LarkRules, tools: Sequence[Tool], parallel: bool
) -> str:
    """Calls as `before NAME middle {arguments} after`. NAME is inside a JSON string or without quotes."""
    calls = [
        f"{rules.literal(before + json.dumps(tool.name)[1:-1] + middle)} {_arguments(rules, tool)}"
        + (f" {rules.literal(after)}" if after else "")
        for tool in tools
    ]
    return _repeated(rules, _any_of(rules, calls), separator, parallel)


def _json_array(
    start: str, end: str, keys: tuple[str, str], rules: LarkRules, tools: Sequence[Tool], parallel: bool
) -> str:
    """`start [{"name": …, "arguments": …}, …] end`."""
    inside = _wrapped_json(f'{{"{keys[0]}": "', f'", "{keys[1]}": ', "}", ", ", rules, tools, parallel)
    return f"{rules.literal(start + '[')} {inside} {rules.literal(']' + end)}"


def _mistral(rules: LarkRules, tools: Sequence[Tool], parallel: bool) -> str:
    return _wrapped_json("[TOOL_CALLS]", "[ARGS]", "", "", rules, tools, parallel)


def _kimi_k2(rules: LarkRules, tools: Sequence[Tool], parallel: bool) -> str:
    """Calls of Kimi K2. They are numbered, and the grammar accepts any number."""
    number = rules.rule("/[0-9]{1,3}/")
    calls = [
        f"{rules.literal('<|tool_call_begin|>functions.' + tool.name + ':')} {number} "
        f"{rules.literal('<|tool_call_argument_begin|>')} {_arguments(rules, tool)} "
        f"{rules.literal('<|tool_call_end|>')}"
        for tool in tools
    ]
    inside = _repeated(rules, _any_of(rules, calls), "", parallel)
    start, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    return f"{rules.literal(start)} {inside} {rules.literal(end)}"


def _deepseek_v3(rules: LarkRules, tools: Sequence[Tool], parallel: bool) -> str:
    inside = _wrapped_json("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "", rules, tools, parallel)
    return f"{rules.literal('<｜tool▁calls▁begin｜>')} {inside} {rules.literal('<｜tool▁calls▁end｜>')}"


def _tag_header(style: TagStyle, word: str, name: str, more: str = "") -> str:
    """An opening tag as the models of this style write it. more: further attributes."""
    if style in (DSML_STYLE, MUSE_STYLE, KIMI_K3_STYLE):
        key = ("tool" if word == style.call_open else "key") if style is KIMI_K3_STYLE else "name"
        name = _checked_name(name, _KEY).replace("&", "&amp;").replace('"', "&quot;")
        return f'{word} {key}="{name}"{more}{style.header_end}'
    _checked_name(name, _BARE_NAME)
    return f"{word}{name}>" if style is QWEN_STYLE else f'{word}"{name}">'


def _tagged(style: TagStyle, start: str, end: str, rules: LarkRules, tools: Sequence[Tool], parallel: bool) -> str:
    """Calls as tags. Parameters come in the order of the schema; optional parameters may be missing."""
    calls = []
    for tool in tools:
        parameters, forms = _forms(tool)
        more = ' index="{}"' if style is KIMI_K3_STYLE else ""
        head, _, tail = _tag_header(style, style.call_open, tool.name, more).partition("{}")
        head = f"{rules.literal(head)} /[0-9]{{1,3}}/" if tail else rules.literal(head + _edge(style))
        opening = f"{head} {rules.literal(tail)}" if tail else head
        for form in forms:
            parts = [_optional(_tagged_argument(rules, style, parameters, member), member[2]) for member in form]
            calls.append(" ".join([opening, *parts, rules.literal(style.call_close)]))
    if style is QWEN_STYLE:  # here each call has its own outer markers
        call = f"{rules.literal(start)} {_any_of(rules, calls)} {rules.literal(end)}"
        return _repeated(rules, rules.rule(call), "\n", parallel)
    inside = _repeated(rules, _any_of(rules, calls), _edge(style), parallel)
    return " ".join(filter(None, [start and rules.literal(start), inside, end and rules.literal(end)]))


def _edge(style: TagStyle) -> str:
    """The text after a tag."""
    return "" if style is KIMI_K3_STYLE else "\n"


def _optional(part: str, is_required: bool) -> str:
    return part if is_required else f"({part})?"


def _tagged_argument(rules: LarkRules, style: TagStyle, parameters: Parameters, member: tuple[str, Any, bool]) -> str:
    name, schema, _ = member
    edge = "\n" if style is QWEN_STYLE else ""
    end = edge + style.argument_close + _edge(style)
    place = Place(style.rules, style.argument_close, end, style.verbatim_open)
    if style not in (DSML_STYLE, KIMI_K3_STYLE):
        return f"{rules.literal(_tag_header(style, style.argument_open, name) + edge)} " + bare_value(
            rules, parameters, schema, place
        )
    shapes = enforceable(parameters, schema).shapes
    found = []
    if text := bare_string(rules, shapes, place):
        more = ' string="true"' if style is DSML_STYLE else ' type="string"'
        found.append(f"{rules.literal(_tag_header(style, style.argument_open, name, more))} {text}")
    kinds = sorted({shape.kind for shape in shapes} - {"string"})
    for kind in kinds if style is KIMI_K3_STYLE else ["", *kinds][: len(kinds) and 1]:
        more = f' type="{kind}"' if kind else ' string="false"'
        value = rules.json(parameters.part(schema, frozenset([kind] if kind else kinds)))
        header = rules.literal(_tag_header(style, style.argument_open, name, more))
        found.append(f"{header} {value} {rules.literal(end)}")
    if not found:
        raise UnenforceableError("a value that this format cannot express")
    return f"({' | '.join(found)})"


def _arg_keys(prefix: str, rules: LarkRules, tools: Sequence[Tool], parallel: bool) -> str:
    close = f"</{prefix}arg_value>"
    place = Place(ARG_KEY_VALUES, close, close + "\n")
    calls = []
    for tool in tools:
        parameters, forms = _forms(tool)
        for form in forms:
            parts = [rules.literal(f"<{prefix}tool_call>{tool.name}\n")]
            for name, schema, is_required in form:
                key = _checked_name(name, _KEY)
                opening = rules.literal(f"<{prefix}arg_key>{key}</{prefix}arg_key>\n<{prefix}arg_value>")
                parts.append(_optional(f"{opening} {bare_value(rules, parameters, schema, place)}", is_required))
            calls.append(" ".join([*parts, rules.literal(f"</{prefix}tool_call>")]))
    return _repeated(rules, _any_of(rules, calls), "\n", parallel)


def _pythonic(start: str, end: str, between: str, rules: LarkRules, tools: Sequence[Tool], parallel: bool) -> str:
    """Calls in Python syntax, with values as JSON, which the parser also accepts."""
    calls = []
    for tool in tools:
        parameters, forms = _forms(tool)
        for form in forms:
            words = [
                (_checked_name(name, _WORD) + "=", rules.json(parameters.part(schema)), needed)
                for name, schema, needed in form
            ]
            inside = _members(rules, words, ", ")
            calls.append(f'{rules.literal(tool.name + "(")} {inside} ")"')
    return f"{rules.literal(start)} {_repeated(rules, _any_of(rules, calls), between, parallel)} {rules.literal(end)}"


def _members(rules: LarkRules, members: Sequence[tuple[str, str, bool]], separator: str) -> str:
    """Names with values, in the order of the schema; optional ones may be missing. members: (name with its sign, the
    expression of its value, whether it is required).

    Each member gives two rules for the text from there to the end: one if the member comes first, one if it follows
    another member.
    """
    first = following = rules.rule('""')
    for name, value, is_required in reversed(members):
        word = f"{rules.literal(name)} {value} {following}"
        skipped_first, skipped = ("", "") if is_required else (f" | {first}", f" | {following}")
        first, following = rules.rule(word + skipped_first), rules.rule(f"{json.dumps(separator)} {word}{skipped}")
    return first


class _Gemma:
    """Values as Gemma writes them: `{key:value}`, with special markers around strings."""

    def __init__(self, rules: LarkRules, parameters: Parameters, quote: str) -> None:
        self._rules = rules
        self._parameters = parameters
        self._place = Place(ValueRules(), quote, quote)
        self._names: dict[str, str] = {}

    def value(self, schema: Any) -> str:
        """A rule for a value of this part of the schema. Raises UnenforceableError."""
        key = json.dumps(schema)
        if key not in self._names:
            name = self._names[key] = self._rules.reserve()
            allowed = enforceable(self._parameters, schema)
            self._rules.define(name, self._any(schema, allowed.shapes))
        return self._names[key]

    def _any(self, schema: Any, shapes: Sequence[Shape]) -> str:
        found = [self._object(shape) for shape in shapes if shape.kind == "object" and shape.literals is None]
        found += [self._items(shape) for shape in shapes if shape.kind == "array" and shape.literals is None]
        found += [
            self._constant(one) for one in shapes if one.kind in ("array", "object") for one in one.literals or ()
        ]
        if text := bare_string(self._rules, shapes, self._place):
            found.append(f"{self._rules.literal(self._place.marker)} {text}")
        if kinds := frozenset(shape.kind for shape in shapes) - {"string", "array", "object"}:
            found.append(self._rules.json(self._parameters.part(schema, kinds)))
        if not found:
            raise UnenforceableError("a value that this format cannot express")
        return " | ".join(found)

    def members(self, shape: Shape) -> str:
        """An object with its braces."""
        form = _members_of(self._parameters, self._parameters.analysis.form(shape))
        members = [(self._key(name), self.value(schema), needed) for name, schema, needed in form]
        return f'"{{" {_members(self._rules, members, ",")} "}}"'

    def _object(self, shape: Shape) -> str:
        others = shape.keyword("additionalProperties")
        if shape.keyword("properties") or shape.keyword("required") or False in others:
            return self.members(shape)
        check_form(self._parameters.analysis.form(shape))
        if shape.keyword("patternProperties"):
            raise UnenforceableError('"patternProperties"')
        member = f'{_KEYS} ":" {self.value({"allOf": others} if len(others) > 1 else others[0] if others else {})}'
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _key(self, name: str) -> str:
        return ("".join([quote := self._place.marker, name, quote]) if not _BARE_KEY.fullmatch(name) else name) + ":"

    def _items(self, shape: Shape) -> str:
        for word in ("prefixItems", "contains", "uniqueItems", "unevaluatedItems", "not"):
            if shape.keyword(word):
                raise UnenforceableError(json.dumps(word))
        schemas = shape.keyword("items")
        least = max([0, *shape.keyword("minItems")])
        most = min(shape.keyword("maxItems"), default=None)
        if most is not None and most < least:
            raise UnenforceableError('"minItems" and "maxItems"')
        if most == 0 or any(schema is False for schema in schemas):
            return '"[]"'
        item = self.value({"allOf": schemas} if len(schemas) > 1 else schemas[0] if schemas else {})
        most_more = "" if most is None else most - 1
        some = f'{item} ("," {item}){{{max(least - 1, 0)},{most_more}}}'
        return f'"[" {_optional(some, least > 0)} "]"'

    def _constant(self, value: Any) -> str:
        """The same pieces as in other values, because the longest piece wins where a text may go on as several."""
        if isinstance(value, list):
            return f'"[" {_joined(map(self._constant, value))} "]"'
        if isinstance(value, dict):
            members = (f"{self._rules.literal(self._key(key))} {self._constant(one)}" for key, one in value.items())
            return f'"{{" {_joined(members)} "}}"'
        if not isinstance(value, str):
            return self._rules.json({"const": value})
        text = bare_string(self._rules, [Shape("string", (value,))], self._place)
        if not text:
            raise UnenforceableError("a value that this format cannot express")
        return f"{self._rules.literal(self._place.marker)} {text}"


def _joined(parts: Iterable[str]) -> str:
    return ' "," '.join(parts)


_KEYS = "/[a-zA-Z_][a-zA-Z0-9_.-]{0,63}/"
"""The names of members that the schema leaves free."""

_BARE_KEY = re.compile(r"[\w.$-]+")


def _gemma(start: str, end: str, quote: str, rules: LarkRules, tools: Sequence[Tool], parallel: bool) -> str:
    """Calls as `call:f{key:value}`."""
    calls = []
    for tool in tools:
        parameters = _parameters_of(tool)
        values = _Gemma(rules, parameters, quote)
        objects = [values.members(shape) for shape in parameters.allowed(parameters.schema).shapes]
        head = rules.literal(start + "call:" + tool.name)
        calls += [f"{head} {one} {rules.literal(end)}" for one in objects]
    return _repeated(rules, _any_of(rules, calls), "", parallel)


def _harmony(rules: LarkRules, tools: Sequence[Tool], parallel: bool) -> str:
    """A Harmony message to a function, from its channel on. There is only one call, because it ends the answer."""
    calls = [
        f"{rules.literal('<|channel|>commentary to=functions.' + tool.name + ' <|constrain|>json<|message|>')} "
        f"{_arguments(rules, tool)}"
        for tool in tools
    ]
    rules.note(WHOLE_MESSAGES)
    return _any_of(rules, calls)


BUILDERS: dict[str, Callable[[LarkRules, Sequence[Tool], bool], str]] = {
    "hermes": partial(_wrapped_json, '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n"),
    "nemotron": partial(_json_array, "<TOOLCALL>", "</TOOLCALL>", ("name", "arguments")),
    "phi4": partial(_json_array, "<|tool_call|>", "<|/tool_call|>", ("name", "arguments")),
    "granite": partial(_json_array, "<|tool_call|>", "", ("name", "arguments")),
    "command": partial(_json_array, "<|START_ACTION|>", "<|END_ACTION|>", ("tool_name", "parameters")),
    "llama3_json": partial(_wrapped_json, '{"name": "', '", "parameters": ', "}", "; "),
    "mistral": _mistral,
    "kimi_k2": _kimi_k2,
    "deepseek_v3": _deepseek_v3,
    "qwen3_coder": partial(_tagged, QWEN_STYLE, "<tool_call>\n", "\n</tool_call>"),
    "seed_oss": partial(_tagged, QWEN_STYLE, "<seed:tool_call>\n", "\n</seed:tool_call>"),
    "minimax_m2": partial(_tagged, MINIMAX_STYLE, "<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    "minicpm5": partial(_tagged, MINICPM_STYLE, "", ""),
    "dsml": partial(_tagged, DSML_STYLE, "<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
    "muse_spark": partial(_tagged, MUSE_STYLE, "<atem:function_calls>\n", "\n</atem:function_calls>"),
    "kimi_k3": partial(_tagged, KIMI_K3_STYLE, "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    "glm47": partial(_arg_keys, ""),
    "longcat": partial(_arg_keys, "longcat_"),
    "gemma4": partial(_gemma, "<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": partial(_gemma, "<start_function_call>", "<end_function_call>", "<escape>"),
    "pythonic": partial(_pythonic, "<|tool_call_start|>[", "]<|tool_call_end|>", ", "),
    "olmo3": partial(_pythonic, "<function_calls>\n", "\n</function_calls>", "\n"),
    "llama4_pythonic": partial(_pythonic, "[", "]", ", "),
    "harmony": _harmony,
}
"""The builders of the grammars, by family."""

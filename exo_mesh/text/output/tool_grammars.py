"""Builds grammars, in llguidance's Lark, that force a model to write tool calls in its family's own format. Pure.

A marker that is one token of the model is written as `<marker>`, which matches only that token; other text is quoted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from exo_mesh.domain.grammar import GrammarSpec
from exo_mesh.text.grammars import lark_of
from exo_mesh.text.output.families.tagged import TagStyle
from exo_mesh.text.output.families.values import is_string_type, is_text_by_qwen, is_text_by_types
from exo_mesh.text.output.families.xml_calls import DSML_STYLE, MINICPM_STYLE, MINIMAX_STYLE, MUSE_STYLE, QWEN_STYLE
from exo_mesh.text.output.tools import Tool

WHOLE_MESSAGES = "whole messages of Harmony"
"""The comment that marks a grammar which also covers the headers of messages."""

MAX_CALLS = 16
"""Most calls in one answer; without a bound a poor model makes calls until its token limit."""

ANY_TEXT = r"/(?s:.*)/"
_TOKEN = re.compile(r"<[^<>\s]+>")

TagValue = Callable[[dict[str, Any]], bool]


class UnenforceableError(Exception):
    """The schema of a tool cannot be enforced in this format. Only this package raises and catches it."""


class LarkRules:
    """Collects the rules of one grammar. tokens: texts that are one token of the model each, with the id or None."""

    def __init__(self, tokens: Collection[tuple[str, int | None]]) -> None:
        self._written = {
            text: text if token_id is None else f"<[{token_id}]>"
            for text, token_id in tokens
            if token_id is not None or _TOKEN.fullmatch(text)
        }
        longest_first = sorted(self._written, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._rules: list[str] = []
        self._notes: list[str] = []

    def literal(self, text: str) -> str:
        """An expression that matches exactly this text."""
        parts, at = [], 0
        for found in self._tokens.finditer(text):
            parts += [json.dumps(text[at : found.start()]), self._written[found.group()]]
            at = found.end()
        return " ".join(part for part in [*parts, json.dumps(text[at:])] if part != '""') or '""'

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule; returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def text_until(self, end: str) -> str:
        """The name of a rule that matches any text up to and including the first `end`."""
        if found := self._tokens.match(end):
            rest = self.literal(end[found.end() :]) if found.end() < len(end) else ""
            return self.rule(f"{self.rule(ANY_TEXT)} {self._written[found.group()]} {rest}")
        if found := self._tokens.search(end):
            return self.rule(f"{self.text_until(end[: found.start()])} {self.literal(end[found.start() :])}")
        return self.rule(ANY_TEXT, f"[suffix={json.dumps(end)}]")

    def json(self, schema: dict[str, Any]) -> str:
        """The name of a rule that matches a JSON value of this schema."""
        return self.rule(lark_of(GrammarSpec("json_schema", json.dumps(schema))))

    def grammar(self, start: str) -> GrammarSpec:
        """The complete grammar, with `start` as its start rule."""
        return GrammarSpec("lark", "\n".join([f"start: {start}", *self._rules, *self._notes]) + "\n")

    def note(self, text: str) -> None:
        """Add a comment at the end of the grammar."""
        self._notes.append(f"// {text}")


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments; unless it says otherwise, additional properties are not allowed."""
    schema = dict(tool.parameters) or {"type": "object", "properties": {}}
    return {"type": "object", "additionalProperties": False, **schema}


def _properties(tool: Tool) -> list[tuple[str, dict[str, Any], bool]]:
    """(name, schema, whether it is required) of each parameter."""
    return _schema_properties(tool.parameters)


def _schema_properties(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    properties, required = schema.get("properties"), schema.get("required")
    return [
        (name, inner if isinstance(inner, dict) else {}, name in (required if isinstance(required, list) else ()))
        for name, inner in (properties if isinstance(properties, dict) else {}).items()
    ]


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
        f"{rules.literal(before + json.dumps(tool.name)[1:-1] + middle)} {rules.json(arguments_schema(tool))}"
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
        f"{rules.literal('<|tool_call_argument_begin|>')} {rules.json(arguments_schema(tool))} "
        f"{rules.literal('<|tool_call_end|>')}"
        for tool in tools
    ]
    inside = _repeated(rules, _any_of(rules, calls), "", parallel)
    start, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    return f"{rules.literal(start)} {inside} {rules.literal(end)}"


def _deepseek_v3(rules: LarkRules, tools: Sequence[Tool], parallel: bool) -> str:
    inside = _wrapped_json("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "", rules, tools, parallel)
    return f"{rules.literal('<｜tool▁calls▁begin｜>')} {inside} {rules.literal('<｜tool▁calls▁end｜>')}"


def _tag_header(style: TagStyle, word: str, name: str, *, is_text: bool | None = None) -> str:
    """An opening tag as the models of this style write it."""
    if style is QWEN_STYLE:
        return f"{word}{name}>"
    if word.endswith("="):
        return f'{word}"{name}">'
    attribute = "" if is_text is None or style is not DSML_STYLE else f' string="{str(is_text).lower()}"'
    return f'{word} name="{name}"{attribute}>'


def _tagged(
    style: TagStyle, is_text: TagValue, start: str, end: str, rules: LarkRules, tools: Sequence[Tool], parallel: bool
) -> str:
    """Calls as tags. Parameters come in the order of the schema; optional parameters may be missing."""
    edge = "\n" if style is QWEN_STYLE else ""
    calls = []
    for tool in tools:
        parts = [rules.literal(_tag_header(style, style.call_open, tool.name) + "\n")]
        for name, schema, is_required in _properties(tool):
            text = is_text(schema)
            opening = rules.literal(_tag_header(style, style.argument_open, name, is_text=text) + edge)
            value = _tag_value(rules, schema, edge + style.argument_close + "\n", text)
            parts.append(f"{opening} {value}" if is_required else f"({opening} {value})?")
        calls.append(" ".join([*parts, rules.literal(style.call_close)]))
    if style is QWEN_STYLE:  # here each call has its own outer markers
        call = f"{rules.literal(start)} {_any_of(rules, calls)} {rules.literal(end)}"
        return _repeated(rules, rules.rule(call), "\n", parallel)
    inside = _repeated(rules, _any_of(rules, calls), "\n", parallel)
    return " ".join(filter(None, [start and rules.literal(start), inside, end and rules.literal(end)]))


def _tag_value(rules: LarkRules, schema: dict[str, Any], end: str, is_text: bool) -> str:
    """A value and the text `end` after it."""
    choices = schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"({' | '.join(rules.literal(choice) for choice in choices)}) {rules.literal(end)}"
    if is_text:
        return rules.text_until(end)
    return f"{rules.json(schema)} {rules.literal(end)}"


def _arg_keys(prefix: str, rules: LarkRules, tools: Sequence[Tool], parallel: bool) -> str:
    calls = []
    for tool in tools:
        parts = [rules.literal(f"<{prefix}tool_call>{tool.name}\n")]
        for name, schema, is_required in _properties(tool):
            opening = f"<{prefix}arg_key>{name}</{prefix}arg_key>\n<{prefix}arg_value>"
            value = _tag_value(rules, schema, f"</{prefix}arg_value>\n", is_string_type(schema))
            parts.append(f"{rules.literal(opening)} {value}" if is_required else f"({rules.literal(opening)} {value})?")
        calls.append(" ".join([*parts, rules.literal(f"</{prefix}tool_call>")]))
    return _repeated(rules, _any_of(rules, calls), "\n", parallel)


def _pythonic(start: str, end: str, rules: LarkRules, tools: Sequence[Tool], parallel: bool) -> str:
    """Calls in Python syntax, with values as JSON, which the parser also accepts."""
    calls = [f'{rules.literal(tool.name + "(")} {_words(rules, _properties(tool))} ")"' for tool in tools]
    inside = _repeated(rules, _any_of(rules, calls), ", ", parallel)
    return f"{rules.literal(start + '[')} {inside} {rules.literal(']' + end)}"


def _words(rules: LarkRules, properties: Sequence[tuple[str, dict[str, Any], bool]]) -> str:
    """Keyword arguments, such as `a=1, b=2`."""
    return _members(rules, properties, "=", ", ", rules.json)


def _members(
    rules: LarkRules,
    properties: Sequence[tuple[str, dict[str, Any], bool]],
    sign: str,
    separator: str,
    value: Callable[[dict[str, Any]], str],
) -> str:
    """Names with values, in the order of the schema; optional ones may be missing.

    Each parameter gives two rules for the text from there to the end: one if the parameter comes first, one if it
    follows another parameter.
    """
    first = following = rules.rule('""')
    for name, schema, is_required in reversed(properties):
        word = f"{rules.literal(name + sign)} {value(schema)} {following}"
        skipped_first, skipped = ("", "") if is_required else (f" | {first}", f" | {following}")
        first, following = rules.rule(word + skipped_first), rules.rule(f"{json.dumps(separator)} {word}{skipped}")
    return first


def _gemma(start: str, end: str, quote: str, rules: LarkRules, tools: Sequence[Tool], parallel: bool) -> str:
    """Calls as `call:f{key:value}`. Raises UnenforceableError if a schema has more than types, enums and properties."""

    def value(schema: dict[str, Any]) -> str:
        kind, choices = schema.get("type"), schema.get("enum")
        if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            return f"({' | '.join(rules.literal(quote + choice + quote) for choice in choices)})"
        if kind == "string":
            return f"{rules.literal(quote)} {rules.text_until(quote)}"
        if kind in ("integer", "number", "boolean", "null"):
            return rules.json(schema)
        if kind == "array" and isinstance(schema.get("items"), dict):
            item = rules.rule(value(schema["items"]))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object":
            return f'"{{" {_members(rules, _schema_properties(schema), ":", ",", value)} "}}"'
        raise UnenforceableError

    calls = [
        f"{rules.literal(start + 'call:' + tool.name)} {value(arguments_schema(tool))} {rules.literal(end)}"
        for tool in tools
    ]
    return _repeated(rules, _any_of(rules, calls), "", parallel)


def _harmony(rules: LarkRules, tools: Sequence[Tool], parallel: bool) -> str:
    """A Harmony message to a function, from its channel on. There is only one call, because it ends the answer."""
    calls = [
        f"{rules.literal('<|channel|>commentary to=functions.' + tool.name + ' <|constrain|>json<|message|>')} "
        f"{rules.json(arguments_schema(tool))}"
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
    "qwen3_coder": partial(_tagged, QWEN_STYLE, is_text_by_qwen, "<tool_call>\n", "\n</tool_call>"),
    "seed_oss": partial(_tagged, QWEN_STYLE, is_text_by_qwen, "<seed:tool_call>\n", "\n</seed:tool_call>"),
    "minimax_m2": partial(_tagged, MINIMAX_STYLE, is_text_by_types, "<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    "minicpm5": partial(_tagged, MINICPM_STYLE, is_text_by_types, "", ""),
    "dsml": partial(_tagged, DSML_STYLE, is_text_by_types, "<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
    "muse_spark": partial(
        _tagged, MUSE_STYLE, lambda schema: False, "<atem:function_calls>\n", "\n</atem:function_calls>"
    ),
    "glm47": partial(_arg_keys, ""),
    "longcat": partial(_arg_keys, "longcat_"),
    "gemma4": partial(_gemma, "<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": partial(_gemma, "<start_function_call>", "<end_function_call>", "<escape>"),
    "pythonic": partial(_pythonic, "<|tool_call_start|>", "<|tool_call_end|>"),
    "llama4_pythonic": partial(_pythonic, "", ""),
    "harmony": _harmony,
}
"""The builders of the families whose calls can be enforced. Those of Kimi K3 and OLMo 3 cannot."""

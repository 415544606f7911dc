"""What the grammar of a tool may write, the reader reads back as the same value: random schemas in every format."""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from exo_mesh.domain.request import GrammarSpec
from exo_mesh.text.grammars import lark_text
from exo_mesh.text.output.formats import HARMONY, OutputFormat, tool_grammar
from exo_mesh.text.output.tool_grammars import BUILDERS
from exo_mesh.text.output.tools import Tool
from exo_mesh.text.output.value_grammars import UnenforceableError
from tests.text.output.outputs import parse
from tests.text.output.random_schemas import Drawn, Schemas, kind_of
from tests.text.text_models import byte_level

CASES = int(os.environ.get("SCHEMA_CASES", "12"))
"""Schemas for each format, each with a value; a fourth of them also with a walk. 1,000 take 5 minutes of CPU."""

FIRST = int(os.environ.get("SCHEMA_FIRST", "0"))
"""The first seed, so that another run draws other schemas."""


class Inexpressible(Exception):
    """The format has no way to write this value."""


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


CLOSES = {
    "qwen3_coder": "</parameter>", "seed_oss": "</parameter>", "minimax_m2": "</parameter>", "minicpm5": "</param>",
    "glm47": "</arg_value>", "longcat": "</longcat_arg_value>", "dsml": "</｜DSML｜parameter>",
    "kimi_k3": "<|close|>argument<|sep|>",
}  # fmt: skip
TRIMS = {"minimax_m2", "minicpm5", "glm47", "longcat"}
TEXT = {"string", "null"}
QUOTE = '<|"|>'


ANYTHING = TEXT | {"boolean", "number", "array", "object"}
UNTYPED = {"minimax_m2": TEXT, "minicpm5": TEXT, "qwen3_coder": TEXT | {"array", "object"},
           "seed_oss": TEXT | {"array", "object"}, "glm47": ANYTHING, "longcat": ANYTHING}  # fmt: skip
"""What a family reads where the schema has no type."""


def bare(family: str, value: Any, drawn: Drawn) -> str:
    """A value as text: a string without quotes, unless it would then be read as another value."""
    kinds = {"number" if kind == "integer" else kind for kind in drawn.kinds}
    kinds = UNTYPED[family] if "any" in kinds else kinds
    if kind_of(value) not in kinds:
        raise Inexpressible
    if not isinstance(value, str):
        return as_json(value)
    if kinds - TEXT:
        if re.match(r'\s*["\[{]', value) or re.fullmatch(r"\s*(-?[0-9].*|null|true|false)\s*", value, re.DOTALL | re.I):
            return as_json(value)
    elif "null" in kinds and value.lower() == "null":
        raise Inexpressible
    if CLOSES[family] in value or (family in TRIMS and value.strip() != value):
        if kinds - TEXT:
            return as_json(value)
        raise Inexpressible
    if family == "minicpm5" and value.startswith("<![CDATA["):
        raise Inexpressible
    return value


def tags(family: str, open_tag: str, arguments: dict[str, Any], drawn: dict[str, Drawn]) -> str:
    close = ("\n" if open_tag.endswith("\n") else "") + CLOSES[family] + "\n"
    opened = ((open_tag.replace("NAME", key), key, value) for key, value in arguments.items())
    return "".join(opening + bare(family, value, drawn[key]) + close for opening, key, value in opened)


def labelled(family: str, arguments: dict[str, Any], drawn: dict[str, Drawn]) -> str:
    made = []
    for key, value in arguments.items():
        if isinstance(value, str) and CLOSES[family] in value:
            raise Inexpressible
        written = value if isinstance(value, str) else as_json(value)
        if family == "dsml":
            label = f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            made.append(f"{label}{written}</｜DSML｜parameter>\n")
        else:
            kind = "integer" if drawn[key].kinds & {"integer", "number"} == {"integer"} else "number"
            kind = kind if kind_of(value) == "number" else kind_of(value)
            label = f'<|open|>argument key="{key}" type="{kind}"<|sep|>'
            made.append(f"{label}{written}<|close|>argument<|sep|>")
    return "".join(made)


def gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        if quote in value:
            raise Inexpressible
        return quote + value + quote
    if isinstance(value, list):
        return f"[{','.join(gemma(one, quote) for one in value)}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(one, quote)}" for key, one in value.items()) + "}"
    return as_json(value)


def written(family: str, name: str, arguments: dict[str, Any], drawn: dict[str, Drawn]) -> str:
    """A call as the models of this family write it."""
    whole = as_json(arguments)
    named = f'{{"name": "{name}", "arguments": {whole}}}'
    words = ", ".join(f"{key}={as_json(value)}" for key, value in arguments.items())
    match family:
        case "hermes":
            return f"<tool_call>\n{named}\n</tool_call>"
        case "nemotron":
            return f"<TOOLCALL>[{named}]</TOOLCALL>"
        case "phi4":
            return f"<|tool_call|>[{named}]<|/tool_call|>"
        case "granite":
            return f"<|tool_call|>[{named}]"
        case "command":
            return f'<|START_ACTION|>[{{"tool_name": "{name}", "parameters": {whole}}}]<|END_ACTION|>'
        case "llama3_json":
            return f'{{"name": "{name}", "parameters": {whole}}}'
        case "mistral":
            return f"[TOOL_CALLS]{name}[ARGS]{whole}"
        case "kimi_k2":
            head = f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
            return f"{head}{whole}<|tool_call_end|><|tool_calls_section_end|>"
        case "deepseek_v3":
            head = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"
            return f"{head}{whole}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        case "harmony":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{whole}"
        case "qwen3_coder" | "seed_oss":
            tag = "tool_call" if family == "qwen3_coder" else "seed:tool_call"
            inside = tags(family, "<parameter=NAME>\n", arguments, drawn)
            return f"<{tag}>\n<function={name}>\n{inside}</function>\n</{tag}>"
        case "minimax_m2":
            inside = tags(family, '<parameter name="NAME">', arguments, drawn)
            return f'<minimax:tool_call>\n<invoke name="{name}">\n{inside}</invoke>\n</minimax:tool_call>'
        case "minicpm5":
            inside = tags(family, '<param name="NAME">', arguments, drawn)
            return f'<function name="{name}">\n{inside}</function>'
        case "muse_spark":
            inside = "".join(
                f'<atem:parameter name="{key}">{as_json(value)}</atem:parameter>\n' for key, value in arguments.items()
            )
            return f'<atem:function_calls>\n<atem:invoke name="{name}">\n{inside}</atem:invoke>\n</atem:function_calls>'
        case "glm47" | "longcat":
            p = "" if family == "glm47" else "longcat_"
            inside = tags(family, f"<{p}arg_key>NAME</{p}arg_key>\n<{p}arg_value>", arguments, drawn)
            return f"<{p}tool_call>{name}\n{inside}</{p}tool_call>"
        case "dsml":
            inside = f'<｜DSML｜invoke name="{name}">\n{labelled(family, arguments, drawn)}</｜DSML｜invoke>'
            return f"<｜DSML｜function_calls>\n{inside}\n</｜DSML｜function_calls>"
        case "kimi_k3":
            inside = (
                f'<|open|>call tool="{name}" index="0"<|sep|>{labelled(family, arguments, drawn)}<|close|>call<|sep|>'
            )
            return f"<|open|>tools<|sep|>{inside}<|close|>tools<|sep|>"
        case "gemma4":
            return f"<|tool_call>call:{name}{gemma(arguments, chr(60) + '|' + chr(34) + '|>')}<tool_call|>"
        case "function_gemma":
            return f"<start_function_call>call:{name}{gemma(arguments, '<escape>')}<end_function_call>"
        case "pythonic":
            return f"<|tool_call_start|>[{name}({words})]<|tool_call_end|>"
        case "olmo3":
            return f"<function_calls>\n{name}({words})\n</function_calls>"
        case "llama4_pythonic":
            return f"[{name}({words})]"
    raise AssertionError(family)


TOKENIZER = byte_level()
IDS = LLTokenizer(TOKENIZER.to_str(), eos_token=TOKENIZER.token_to_id("<|endoftext|>"))


def output_of(family: str) -> OutputFormat:
    return HARMONY if family == "harmony" else OutputFormat(family, tool_family=family)


def same(first: Any, second: Any) -> bool:
    """Whether two JSON values are equal; unlike Python, JSON knows that true is not 1."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return type(first) is type(second) and first == second


def check(family: str, seed: int, counts: Counter[str]) -> None:
    """One schema and one value in one format."""
    schemas = Schemas(seed)
    schema, members = schemas.parameters()
    tool = Tool("do_it", "does it", schema)
    output = output_of(family)
    arguments = schemas.members(members)
    jsonschema.Draft202012Validator(schema).validate(arguments)
    try:
        text = written(family, tool.name, arguments, {name: drawn for name, drawn, _ in members})
        spec = tool_grammar(output, [tool], "required", True)
    except (Inexpressible, UnenforceableError) as exc:
        counts[type(exc).__name__] += 1
        return
    assert spec is not None
    case = f"{family}, seed {seed}\n{json.dumps(schema)}\n{text}"
    matcher = LLMatcher(IDS, lark_text(spec), log_level=0)
    assert not matcher.is_error(), f"{case}\n{matcher.get_error()}\n{spec.text}"
    ids = TOKENIZER.encode(text).ids
    assert matcher.consume_tokens(ids) and matcher.is_accepting(), f"{case}\n{spec.text}"
    parsed = parse(output, text, tools=[tool])
    assert parsed.text == "" and len(parsed.calls) == 1, case
    read = json.loads(parsed.calls[0][1])
    assert same(read, arguments), f"{case}\n{read}\n{arguments}"
    counts["same"] += 1


EOS = TOKENIZER.token_to_id("<|endoftext|>")
ENDS = {TOKENIZER.token_to_id(text) for text in ('"', "<", "/", "}", "]", ")", "Ċ", ">")}


def walk(spec: GrammarSpec, seed: int, closes: list[list[int]]) -> str | None:
    """What a model of random weights writes under a grammar; None if it does not end. closes: the tokens of the markers
    after a text, which random weights would hardly ever write."""
    matcher = LLMatcher(IDS, lark_text(spec), log_level=0)
    draw, ids = random.Random(seed), []
    for _ in range(500):
        if forced := matcher.compute_ff_tokens():
            chosen = forced
        elif draw.random() < 0.2 and (fitting := [one for one in closes if matcher.validate_tokens(one) == len(one)]):
            chosen = draw.choice(fitting)
        else:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = [int(one) for one in np.flatnonzero(bits)]
            assert allowed, f"a dead end after {TOKENIZER.decode(ids)}\n{spec.text}"
            ends = [one for one in allowed if one in ENDS]
            chosen = [EOS if EOS in allowed else draw.choice(ends if ends and draw.random() < 0.6 else allowed)]
        if EOS in chosen:
            return TOKENIZER.decode(ids)
        assert matcher.consume_tokens(chosen), matcher.get_error()
        ids += chosen
    return None


def check_walk(family: str, seed: int, counts: Counter[str]) -> None:
    """One schema in one format: what a random model writes is one call whose arguments are valid."""
    schema, _ = Schemas(seed).parameters()
    tool = Tool("do_it", "does it", schema)
    try:
        spec = tool_grammar(output_of(family), [tool], "required", False)
    except UnenforceableError as exc:
        counts[type(exc).__name__] += 1
        return
    assert spec is not None
    close = CLOSES.get(family, {"gemma4": '<|"|>', "function_gemma": "<escape>"}.get(family, '"'))
    text = walk(spec, seed, [TOKENIZER.encode(edge + close).ids for edge in ("", "\n")])
    if text is None or "\ufffd" in text:  # the latter is cut inside a character
        counts["unfinished"] += 1
        return
    case = f"{family}, seed {seed}\n{json.dumps(schema)}\n{text}"
    parsed = parse(output_of(family), text, tools=[tool])
    assert parsed.text == "" and len(parsed.calls) == 1, case
    error = next(jsonschema.Draft202012Validator(schema).iter_errors(json.loads(parsed.calls[0][1])), None)
    assert error is None, f"{case}\n{error.message}"
    counts["valid"] += 1


@pytest.mark.parametrize("family", sorted(BUILDERS))
def test_what_a_random_model_writes_is_valid(family: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + CASES // 4):
        check_walk(family, seed * len(BUILDERS) + sorted(BUILDERS).index(family), counts)
    assert counts["valid"] >= CASES // 4 * 0.6, counts


@pytest.mark.parametrize("family", sorted(BUILDERS))
def test_a_value_that_a_grammar_allows_is_read_back(family: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + CASES):
        check(family, seed * len(BUILDERS) + sorted(BUILDERS).index(family), counts)
    assert counts["same"] >= CASES * 0.6, counts


@pytest.mark.parametrize(("family", "seed"), [("minimax_m2", 120004647), ("minicpm5", 168004142)])
def test_an_alternative_that_allows_anything_makes_the_others_void(family: str, seed: int) -> None:
    """A constant beside it was read as what it looks like."""
    counts: Counter[str] = Counter()
    check(family, seed, counts)
    assert counts["same"]

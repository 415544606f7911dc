"""A grammar of tool calls lets a model write nothing but calls, in its family's format."""

from __future__ import annotations

import json
import random

import pytest
from llguidance import LLMatcher, LLTokenizer
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer

from exo_mesh.domain.request import GrammarSpec
from exo_mesh.errors import InputError
from exo_mesh.text.grammars import lark_of, lark_text
from exo_mesh.text.output.families.table import FAMILIES
from exo_mesh.text.output.formats import (
    HARMONY,
    OutputFormat,
    after_reasoning,
    as_answer,
    format_of,
    tool_grammar,
)
from exo_mesh.text.output.harmony import HARMONY_MARKERS
from exo_mesh.text.output.tool_grammars import BUILDERS
from exo_mesh.text.output.tools import Tool
from tests.text.checked_grammars import check_grammar
from tests.text.output.outputs import parse
from tests.text.text_models import byte_level

PICK = Tool(
    "pick",
    "picks",
    {
        "type": "object",
        "properties": {
            "color": {"type": "string", "enum": ["red", "green"]},
            "size": {"type": "integer", "minimum": 1, "maximum": 99},
            "note": {"type": "string", "maxLength": 3},
            "ok": {"type": "boolean"},
        },
        "required": ["color", "size"],
    },
)
STOP = Tool("stop", "stops", {})


def tokenizer_with(markers: frozenset[str]) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in sorted(markers)])
    return tokenizer


def written(spec: GrammarSpec, tokenizer: Tokenizer, seed: int, max_tokens: int = 600) -> str | None:
    """What a model of random weights writes under a grammar, special tokens as text; None if it never ends."""
    check_grammar(spec)
    eos = tokenizer.token_to_id("<|endoftext|>")
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=eos), lark_text(spec))
    assert not matcher.is_error(), matcher.get_error()
    draw, ids = random.Random(seed), []
    for _ in range(max_tokens):
        bits = matcher.compute_bitmask()
        allowed = [i for i in range(tokenizer.get_vocab_size()) if bits[i // 8] >> (i % 8) & 1]
        ends = [i for i in allowed if tokenizer.id_to_token(i) in ("<|endoftext|>", '"', "</", "Ċ", "<")]
        specials = [i for i in allowed if i > eos]
        chosen = draw.choice(specials or ends or allowed) if draw.random() < 0.7 else draw.choice(allowed)
        if chosen == eos:
            return tokenizer.decode(ids, skip_special_tokens=False)
        assert matcher.consume_token(chosen)
        ids.append(chosen)
    return None


def checked(output: OutputFormat, spec: GrammarSpec, tokenizer: Tokenizer, names: set[str], seed: int, **options: bool):
    text = written(spec, tokenizer, seed)
    if text is None:
        return None
    parsed = parse(output, text, tools=[PICK, STOP], **options)
    assert parsed.calls, text
    assert parsed.text == "", text
    for name, arguments in parsed.calls:
        assert name in names
        value = json.loads(arguments)
        if name == "pick":
            assert value["color"] in ("red", "green"), text
            assert 1 <= value["size"] <= 99
        else:
            assert value == {}
    return parsed


QUICK = {"hermes", "qwen3_coder", "mistral", "gemma4"}


@pytest.mark.parametrize("with_tokens", [True, pytest.param(False, marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.extended) for name in sorted(BUILDERS)]
)
def test_what_a_random_model_writes_is_calls(family: str, with_tokens: bool) -> None:
    plain = HARMONY if family == "harmony" else OutputFormat(family, "<think>", "</think>", family)
    markers = plain.markers(has_tools=True) if with_tokens or family == "harmony" else frozenset()
    tokenizer = tokenizer_with(markers)
    output = replace(plain, tokens=tuple((text, tokenizer.token_to_id(text)) for text in markers))
    required = tool_grammar(output, [PICK, STOP], "required", True)
    named = tool_grammar(output, [PICK, STOP], "pick", True)
    assert required is not None and named is not None
    results = [checked(output, required, tokenizer, {"pick", "stop"}, seed) for seed in range(3)]
    results += [checked(output, named, tokenizer, {"pick"}, seed) for seed in range(3)]
    assert any(results)
    assert all(len(result.calls) == 1 for result in results[3:] if result)


def test_a_schema_that_a_format_has_no_words_for_is_refused_by_its_keyword() -> None:
    pair = {"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}]}
    tool = Tool("f", "", {"type": "object", "properties": {"a": pair}})
    with pytest.raises(InputError, match="prefixItems"):
        tool_grammar(OutputFormat("gemma4", tool_family="gemma4"), [tool], "required", True)


def test_choices_that_leave_the_model_free_have_no_grammar() -> None:
    output = OutputFormat("hermes", tool_family="hermes")
    assert tool_grammar(output, [PICK], "auto", True) is None
    assert tool_grammar(output, [PICK], "none", True) is None
    assert tool_grammar(output, [], "required", True) is None
    assert tool_grammar(OutputFormat("plain"), [PICK], "required", True) is None


def test_every_family_is_enforced() -> None:
    assert FAMILIES.keys() | {"harmony"} == BUILDERS.keys()


def accepts(spec: GrammarSpec, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a model that wants to write this text may do so."""
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=0), lark_text(spec), log_level=0)
    return matcher.consume_tokens(tokenizer.encode(text).ids) and matcher.is_accepting()


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("markers", [frozenset({"<think>", "</think>"}), frozenset()])
def test_a_grammar_holds_only_after_the_thought(markers: frozenset[str], with_ids: bool) -> None:
    tokenizer = tokenizer_with(markers)
    tokens = tuple((text, tokenizer.token_to_id(text) if with_ids else None) for text in markers)
    output = OutputFormat("hermes", "<think>", "</think>", "hermes", tokens=tokens)
    answer = GrammarSpec("choice", '["yes", "no"]')
    inside, outside = after_reasoning(output, answer, True), after_reasoning(output, answer, False)
    for text in ("Hm, </no.\n</think>\n\nyes", "</think>no"):
        assert accepts(inside, tokenizer, text)
        assert accepts(outside, tokenizer, f"<think>{text}")
        assert not accepts(outside, tokenizer, text)
    assert accepts(outside, tokenizer, "yes")
    assert not accepts(inside, tokenizer, "yes")
    assert not accepts(outside, tokenizer, "<think>a</think>maybe")


def test_harmony_thinks_before_an_answer_or_a_call() -> None:
    tokenizer = tokenizer_with(frozenset(HARMONY_MARKERS))
    output = format_of(None, "gpt_oss", {text: tokenizer.token_to_id(text) for text in HARMONY_MARKERS})
    answer = GrammarSpec("choice", '["yes", "no"]')
    calls = tool_grammar(output, [PICK], "required", True)
    assert calls is not None
    either = GrammarSpec("lark", f"start: {lark_of(as_answer(output, answer))} | {lark_of(calls)}")
    thought, final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", "<|channel|>final<|message|>yes"
    call = "<|channel|>commentary to=functions.pick <|constrain|>json<|message|>" + '{"color": "red", "size": 3}'
    accepted = {final: (answer, either), call: (calls, either)}
    for text, specs in accepted.items():
        for spec in (answer, calls, either):
            whole = after_reasoning(output, spec, False)
            check_grammar(whole)
            for head in ("", thought):
                assert accepts(whole, tokenizer, head + text) is (spec in specs)
            assert not accepts(whole, tokenizer, "yes")
            assert not accepts(whole, tokenizer, "<|channel|>final<|message|>" + text)
    assert any(checked(output, after_reasoning(output, calls, False), tokenizer, {"pick"}, seed) for seed in range(4))

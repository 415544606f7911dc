"""Every family of tool calls: the same events wherever the text is cut, and broken calls are text."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_mesh.domain.request import FinishReason
from exo_mesh.text.assembler import Piece
from exo_mesh.text.output.events import OutputEnd
from exo_mesh.text.output.families.table import FAMILIES
from exo_mesh.text.output.formats import OutputFormat
from exo_mesh.text.output.parser import OutputParser
from tests.text.output.family_calls import CALLS, TOOLS, D, minicpm, qwen
from tests.text.output.outputs import Parsed, events_of, joined, parse

FORMATS = {name: OutputFormat(name, "<think>", "</think>", name) for name in FAMILIES}
ROME = ["get_weather", '{"city": "Rome"}']
ALL_CALLS = [pytest.param(name, text, id=f"{name}-{i}") for name in CALLS for i, text in enumerate(CALLS[name])]


def test_the_corpus_has_calls_of_every_family() -> None:
    assert CALLS.keys() == FAMILIES.keys()


@pytest.mark.parametrize(
    ("family", "index", "calls"),
    [
        ("dsml", 0, [["get_weather", '{"city": "Rome", "days": 3}']]),
        ("dsml", 1, [["ping", "{}"], ["save-note", '{"body": " 5 "}']]),
        ("olmo3", 0, [ROME, ["ping", "{}"]]),
        ("llama4_pythonic", 0, [["get_weather", '{"city": "Rome", "days": 3}'], ["ping", "{}"]]),
        ("llama4_pythonic", 1, [["ping", "{}"]]),
        ("llama3_json", 0, [ROME]),
        ("llama3_json", 1, [ROME, ["ping", "{}"]]),
        ("llama3_json", 2, [["ping", "{}"]]),
        ("seed_oss", 0, [["get_weather", '{"city": "Rome", "days": 3}']]),
        ("granite", 0, [ROME]),
        ("phi4", 0, [ROME]),
        ("nemotron", 0, [ROME]),
        ("command", 0, [ROME]),
        ("deepseek_v3", 0, [ROME]),
        ("deepseek_v3", 1, [ROME, ["ping", "{}"]]),
    ],
)
def test_calls_of_families_that_mlx_lm_does_not_know(family: str, index: int, calls: list[list[str]]) -> None:
    parsed = parse(FORMATS[family], CALLS[family][index], tools=TOOLS)
    assert parsed == Parsed("", "", calls, "tool_calls", "c" * len(calls))


def check_every_cut(family: str, text: str) -> None:
    """In two pieces, wherever they meet; and ended anywhere, in one piece and in many."""
    text = text if FAMILIES[family].bare_starts else f"<think>Hm.\n</think>\n\nOne moment.\n{text}\nDone."
    whole = joined(events_of(FORMATS[family], [text], tools=TOOLS))
    assert whole.calls
    for cut in range(1, len(text)):
        assert joined(events_of(FORMATS[family], [text[:cut], text[cut:]], tools=TOOLS)) == whole
    for stop in range(0, len(text), 7):
        for reason in FinishReason:
            once = joined(events_of(FORMATS[family], [text[:stop]], tools=TOOLS, finish=reason))
            assert joined(events_of(FORMATS[family], text[:stop], tools=TOOLS, finish=reason)) == once


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_events_do_not_depend_on_where_a_short_answer_is_cut(family: str) -> None:
    check_every_cut(family, min(CALLS[family], key=len))


@pytest.mark.extended
@pytest.mark.parametrize(("family", "text"), ALL_CALLS)
def test_the_events_do_not_depend_on_where_an_answer_is_cut(family: str, text: str) -> None:
    check_every_cut(family, text)


def fragments() -> st.SearchStrategy[str]:
    """Markers and parts of calls of every family, and anything else."""
    words = {marker for family in FAMILIES.values() for marker in family.markers}
    words |= {"<think>", "</think>", "{", "}", "[", "]", '"', ":", ",", "\\", "name", "arguments", "ping", "call:", "("}
    words |= {
        " ",
        "\n",
        "null",
        "1",
        ")",
        "=",
        ">",
        "<param name=",
        "<parameter=x>",
        "```json\n",
        "é",
        "🙂",
        "</",
        "\\ud800",
        "'",
    }
    calls = [text for texts in CALLS.values() for text in texts]
    return st.one_of(
        st.sampled_from(sorted(words)),
        st.sampled_from(calls),
        st.sampled_from(calls).flatmap(lambda text: st.integers(0, len(text)).map(lambda n: text[:n])),
        st.text(max_size=4),
    )


def check_any_text(family: str, text: str, cuts: list[int], finish: FinishReason) -> None:
    """The same events whole, in these pieces, and one character at a time."""
    borders = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(borders)]
    whole = joined(events_of(FORMATS[family], [text], tools=TOOLS, finish=finish))
    assert joined(events_of(FORMATS[family], pieces, tools=TOOLS, finish=finish)) == whole
    assert joined(events_of(FORMATS[family], text, tools=TOOLS, finish=finish)) == whole
    if finish is FinishReason.STOP:
        assert whole.finish == ("tool_calls" if whole.calls else "stop")


ANY_TEXT = (
    st.sampled_from(sorted(FORMATS)),
    st.lists(fragments(), max_size=8).map("".join),
    st.lists(st.integers(0, 400), max_size=6),
    st.sampled_from(list(FinishReason)),
)


@settings(max_examples=25)
@given(*ANY_TEXT)
def test_any_text_gives_the_same_events_however_it_is_cut(
    family: str, text: str, cuts: list[int], finish: FinishReason
) -> None:
    check_any_text(family, text, cuts, finish)


@pytest.mark.extended
@settings(max_examples=300, deadline=None)
@given(*ANY_TEXT)
def test_much_text_gives_the_same_events_however_it_is_cut(
    family: str, text: str, cuts: list[int], finish: FinishReason
) -> None:
    check_any_text(family, text, cuts, finish)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_only_begins_like_a_call_is_text_as_it_was_written(family: str) -> None:
    for start in FAMILIES[family].starts:
        for rest in ("", " is a marker.", " {", ' {"name": 1}', " [", " [1]", " f(", "call:{}"):
            text = f"See {start}{rest}"
            assert parse(FORMATS[family], text, tools=TOOLS) == Parsed(text, "", [], "stop", "t")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_after_what_was_no_call_a_call_is_read(family: str) -> None:
    call = CALLS[family][0]
    if FAMILIES[family].bare_starts:
        call = f"{FAMILIES[family].starts[0]}{call}"
    parsed = parse(FORMATS[family], f"No {FAMILIES[family].starts[0]} that. {call}", tools=TOOLS)
    assert parsed.calls == parse(FORMATS[family], call, tools=TOOLS).calls
    assert parsed.text.startswith("No ")


MALFORMED = {
    "qwen3_coder": ("<tool_call><function=></function>", "<tool_call>\n<function=f"),
    "glm47": ("<tool_call>two words<arg_key>a</arg_key>", "<tool_call>f oops</tool_call>"),
    "gemma4": ("<|tool_call>call:a b{}", "<|tool_call>call:f"),
    "kimi_k2": ("<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}",),
    "mistral": ("[TOOL_CALLS]two words[ARGS]{}", '[TOOL_CALLS][{"name": "f", "arguments": 3}]', "[TOOL_CALLS]f[ARGS]3"),
    "pythonic": ("<|tool_call_start|>[f(1)]", "<|tool_call_start|>[f(**x)]", "<|tool_call_start|>[f(x=g())]"),
    "llama3_json": ('{"name": "Bob", "parameters": {}}', '{"name": "ping"}', "{}", '[{"a": 1}]', '{"parameters": {}}'),
    "dsml": (f"<{D}function_calls>\n<{D}invoke>",),
    "deepseek_v3": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}",),
}


@pytest.mark.parametrize("family", sorted(MALFORMED))
def test_broken_calls_are_text_as_they_were_written(family: str) -> None:
    for text in MALFORMED[family]:
        assert parse(FORMATS[family], text, tools=TOOLS) == Parsed(text, "", [], "stop", "t")


def test_a_call_that_breaks_in_its_arguments_keeps_what_was_written() -> None:
    text = "<tool_call>\n<function=save-note>\n<parameter=title>\nA\n</parameter>\noops\n</function>\n</tool_call>"
    assert parse(FORMATS["qwen3_coder"], text, tools=TOOLS).calls == [["save-note", '{"title": "A"}']]
    cut = "<tool_call>\n<function=save-note>\n<parameter=title>\nAbc"
    assert parse(FORMATS["qwen3_coder"], cut, tools=TOOLS).calls == [["save-note", '{"title": "Abc']]


def test_a_lone_surrogate_that_a_model_escapes_can_be_sent() -> None:
    texts = {
        "hermes": '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}</tool_call>',
        "pythonic": '<|tool_call_start|>[f(a="\\ud800")]<|tool_call_end|>',
        "glm47": '<tool_call>f<arg_key>a</arg_key><arg_value>"\\ud800"</arg_value></tool_call>',
    }
    for family, text in texts.items():
        assert json.loads(parse(FORMATS[family], text, tools=TOOLS).calls[0][1]) == {"a": "\ud800"}
    text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert parse(FORMATS["hermes"], text, tools=TOOLS).text == text


def test_a_forgotten_outer_marker_costs_nothing() -> None:
    parsed = parse(FORMATS["qwen3_coder"], f"{qwen('ping')}\n</tool_call>", tools=TOOLS)
    assert parsed == Parsed("", "", [["ping", "{}"]], "tool_calls", "c")


def test_markers_inside_values_are_text_of_the_values() -> None:
    body = "</tool_call></function><tool_call><think>{}"
    parsed = parse(FORMATS["qwen3_coder"], f"<tool_call>{qwen('save-note', body=body)}</tool_call>", tools=TOOLS)
    assert json.loads(parsed.calls[0][1]) == {"body": body}
    parsed = parse(FORMATS["minicpm5"], minicpm("f", body="<![CDATA[</param></function>]]>"), tools=TOOLS)
    assert json.loads(parsed.calls[0][1]) == {"body": "</param></function>"}
    parsed = parse(FORMATS["pythonic"], "<|tool_call_start|>[f(x='<|tool_call_end|>)]')]<|tool_call_end|>", tools=TOOLS)
    assert json.loads(parsed.calls[0][1]) == {"x": "<|tool_call_end|>)]"}


LONG = {
    "hermes": '<tool_call>{{"name": "save-note", "arguments": {{"body": "{}"}}}}</tool_call>',
    "qwen3_coder": "<tool_call><function=save-note><parameter=body>{}</parameter></function></tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="save-note"><parameter name="tags">{}</parameter></invoke>',
    "glm47": "<tool_call>save-note<arg_key>body</arg_key><arg_value>{}</arg_value></tool_call>",
    "gemma4": '<|tool_call>call:save-note{{body:<|"|>{}<|"|>}}<tool_call|>',
    "pythonic": '<|tool_call_start|>[f(body="{}")]<|tool_call_end|>',
    "mistral": '[TOOL_CALLS]save-note[ARGS]{{"body": "{}"}}',
}


@pytest.mark.parametrize(
    "family", ["hermes", *(pytest.param(name, marks=pytest.mark.extended) for name in LONG if name != "hermes")]
)
def test_a_megabyte_of_arguments_is_read_once(family: str) -> None:
    """Each piece is read when it comes: next to nothing of the text is kept to be looked at again."""
    text = LONG[family].format("0123 <b> \\n] é(" * (1 << 16))
    parser = OutputParser(FORMATS[family], tools=TOOLS)
    num_events = 0
    for start in range(0, len(text), 1 << 12):
        num_events += len(parser.push(Piece(text[start : start + (1 << 12)])))
        assert parser.num_held < 64
    assert parser.push(Piece("", (), FinishReason.STOP))[-1] == OutputEnd("tool_calls")
    assert num_events < len(text) >> 8


def check_every_stop(family: str, text: str) -> None:
    """A client runs the calls of an answer that ends with `tool_calls`, so their arguments must be whole."""
    for cut in range(1, len(text) + 1):
        parser = OutputParser(FORMATS[family], tools=TOOLS)
        events = parser.push(Piece(text[:cut], (), FinishReason.STOP, "\N{BELL}"))
        parsed, end = joined(events), events[-1]
        is_whole = bool(parsed.calls) and is_json(parsed.calls[-1][1])
        assert end == OutputEnd("tool_calls" if is_whole else "stop", "\N{BELL}"), parsed


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_stop_string_inside_a_short_call_does_not_end_the_answer_as_a_call(family: str) -> None:
    check_every_stop(family, min(CALLS[family], key=len))


@pytest.mark.extended
@pytest.mark.parametrize(("family", "text"), ALL_CALLS)
def test_a_stop_string_inside_a_call_does_not_end_the_answer_as_a_call(family: str, text: str) -> None:
    check_every_stop(family, text)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True

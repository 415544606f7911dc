"""Every family of tool calls: the same events wherever the text is cut, and broken calls are text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.domain.request import FinishReason
from exo_mesh.text.output.families.table import FAMILIES
from exo_mesh.text.output.formats import OutputFormat
from tests.text.output.family_calls import CALLS, TOOLS
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


@pytest.mark.parametrize(("family", "text"), ALL_CALLS)
def test_the_events_do_not_depend_on_where_the_text_is_cut_in_two(family: str, text: str) -> None:
    text = text if FAMILIES[family].bare_starts else f"<think>Hm.\n</think>\n\nOne moment.\n{text}\nDone."
    whole = joined(events_of(FORMATS[family], [text], tools=TOOLS))
    assert whole.calls
    for cut in range(1, len(text)):
        assert joined(events_of(FORMATS[family], [text[:cut], text[cut:]], tools=TOOLS)) == whole
    for reason in FinishReason:
        for stop in range(0, len(text), 3):
            options = {"tools": TOOLS, "finish": reason}
            once = joined(events_of(FORMATS[family], [text[:stop]], **options))
            assert joined(events_of(FORMATS[family], text[:stop], **options)) == once
            assert whole.calls[: len(once.calls)] == once.calls or len(once.calls) > 0


def fragments() -> st.SearchStrategy[str]:
    """Markers and parts of calls of every family, and anything else."""
    words = {marker for family in FAMILIES.values() for marker in family.markers}
    words |= {"<think>", "</think>", "{", "}", "[", "]", '"', ":", ",", "\\", "name", "arguments", "ping", "call:", "("}
    words |= {" ", "\n", "null", "1", ")", "=", ">", "<param name=", "<parameter=x>", "```json\n", "é", "🙂", "</"}
    calls = [text for texts in CALLS.values() for text in texts]
    return st.one_of(
        st.sampled_from(sorted(words)),
        st.sampled_from(calls),
        st.sampled_from(calls).flatmap(lambda text: st.integers(0, len(text)).map(lambda n: text[:n])),
        st.text(max_size=4),
    )


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(fragments(), max_size=8).map("".join),
    st.lists(st.integers(0, 400), max_size=6),
    st.sampled_from(list(FinishReason)),
)
def test_any_text_gives_the_same_events_however_it_is_cut(
    family: str, text: str, cuts: list[int], finish: FinishReason
) -> None:
    borders = [0, *sorted({min(cut, len(text)) for cut in cuts}), len(text)]
    pieces = [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    whole = joined(events_of(FORMATS[family], [text], tools=TOOLS, finish=finish))
    assert joined(events_of(FORMATS[family], pieces, tools=TOOLS, finish=finish)) == whole
    assert joined(events_of(FORMATS[family], text, tools=TOOLS, finish=finish)) == whole
    assert "think>" not in whole.text or "think>" in text.replace("<think>", "").replace("</think>", "")
    if finish is FinishReason.STOP:
        assert whole.finish == ("tool_calls" if whole.calls else "stop")

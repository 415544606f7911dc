"""An answer is taken apart into text, thoughts and tool calls, wherever its pieces were cut."""

from __future__ import annotations

import pytest

from exo_mesh.domain.request import FinishReason, TokenEvent
from exo_mesh.text.assembler import Piece, TokenSpan
from exo_mesh.text.output.events import OutputEnd, ReasoningPart, TextPart, ToolCallArguments, ToolCallBegin
from exo_mesh.text.output.formats import PLAIN, OutputFormat
from exo_mesh.text.output.parser import OutputParser
from tests.text.output.outputs import WEATHER, Parsed, events_of, joined, parse

HERMES = OutputFormat("hermes", "<think>", "</think>", "hermes")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_plain_text_passes_unchanged() -> None:
    text = "  <think> is a word, <tool_call> too \n\n"
    assert parse(PLAIN, text) == Parsed(text=text, finish="stop", order="t")


def test_a_thought_is_reasoning_and_its_markers_are_nowhere() -> None:
    assert parse(HERMES, "<think>\nHm, 2 < 3.\n</think>\n\nYes.\n") == Parsed("Yes.\n", "Hm, 2 < 3.", [], "stop", "rt")


def test_a_thought_that_the_prompt_opened() -> None:
    parsed = parse(HERMES, "Hm.\n</think>\n\nYes.", starts_in_reasoning=True)
    assert parsed == Parsed("Yes.", "Hm.", [], "stop", "rt")


def test_an_empty_thought_leaves_no_part() -> None:
    assert parse(HERMES, "<think>\n\n</think>\n\nYes.") == Parsed("Yes.", "", [], "stop", "t")


def test_a_call_between_text() -> None:
    parsed = parse(HERMES, f"<think>Look it up.</think>\nOne moment.\n{CALL}")
    assert parsed == Parsed("One moment.", "Look it up.", [["get_weather", '{"city": "Rome"}']], "tool_calls", "rtc")


def test_calls_one_after_the_other() -> None:
    parsed = parse(HERMES, f"{CALL}\n{CALL}\n")
    assert parsed.calls == [["get_weather", '{"city": "Rome"}']] * 2
    assert parsed.text == ""


def test_calls_beyond_the_first_are_dropped_if_one_is_wanted() -> None:
    parsed = parse(HERMES, f"{CALL}\n{CALL}\n", max_calls=1)
    assert len(parsed.calls) == 1
    assert parsed.finish == "tool_calls"


def test_without_tools_nothing_is_a_call() -> None:
    assert parse(HERMES, CALL, tools=()) == Parsed(CALL, "", [], "stop", "t")


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = OutputParser(HERMES, tools=[WEATHER])
    assert parser.push(Piece('<tool_call>{"name": "get_weather", "argu')) == []
    assert parser.push(Piece('ments": {"ci')) == [ToolCallBegin(0, "get_weather"), ToolCallArguments(0, '{"ci')]
    assert parser.push(Piece('ty": "Ro')) == [ToolCallArguments(0, 'ty": "Ro')]


def test_markers_inside_strings_are_text_of_the_strings() -> None:
    arguments = '{"city": "</tool_call><think>\\"}<tool_call>\\\\"}'
    parsed = parse(HERMES, f'<tool_call>{{"arguments": {arguments}, "name": "f"}}</tool_call>ok')
    assert parsed == Parsed("ok", "", [["f", arguments]], "tool_calls", "ct")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no JSON</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f" oops',
        "<tool_call>",
    ],
)
def test_what_is_no_call_is_text_as_it_was_written(text: str) -> None:
    assert parse(HERMES, f"See: {text}") == Parsed(f"See: {text}", "", [], "stop", "t")


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"type": "function", "function": {"name": "f", "parameters": {"a": [1, {}]}}}', '{"a": [1, {}]}'),
        ('{"name": "f", "arguments": {"a": "x\ny"}}', '{"a": "x\\ny"}'),
        ('{"name": "f", "arguments": {"a": 1}}}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
        ('[{"name": "f", "arguments": {"a": 1}}]', '{"a": 1}'),
    ],
)
def test_calls_that_are_written_a_little_differently(call: str, arguments: str) -> None:
    parsed = parse(HERMES, f"<tool_call>\n{call}\n</tool_call>\n")
    assert parsed == Parsed("", "", [["f", arguments]], "tool_calls", "c")


def test_a_call_that_the_limit_cuts_is_as_long_as_it_was_written() -> None:
    parsed = parse(HERMES, '<tool_call>{"name": "f", "arguments": {"a": "xy', finish=FinishReason.LENGTH)
    assert parsed == Parsed("", "", [["f", '{"a": "xy']], "length", "c")


@pytest.mark.parametrize("marker", ["<think>", "</think>"])
def test_a_marker_that_the_limit_cuts_is_not_shown(marker: str) -> None:
    for length in range(1, len(marker)):
        parsed = parse(
            HERMES, f"Hm.\n</think>Yes{marker[:length]}", finish=FinishReason.LENGTH, starts_in_reasoning=True
        )
        assert parsed == Parsed("Yes", "Hm.", [], "length", "rt")


def test_a_short_end_that_could_begin_a_marker_is_text_if_the_answer_is_complete() -> None:
    assert parse(HERMES, "1 <").text == "1 <"
    assert parse(HERMES, "1 <thi").text == "1 "


def spans(*texts: str) -> list[Piece]:
    """A piece for each token."""
    pieces, start = [], 0
    for index, text in enumerate(texts):
        pieces.append(Piece(text, (TokenSpan(TokenEvent(index, index), start, start + len(text)),)))
        start += len(text)
    return pieces


def test_tokens_come_with_the_part_that_their_text_is_in() -> None:
    pieces = spans("<think>", "\n", "a", "b\n", "</think>", "\n\n", "Yes", " sir", "", "!", '<tool_call>{"na')
    parser = OutputParser(HERMES, tools=[WEATHER])
    events = [event for piece in pieces for event in parser.push(piece)]
    assert [
        (type(event).__name__, event.text, [span.event.index for span in event.tokens])
        for event in events
        if isinstance(event, TextPart | ReasoningPart)
    ] == [
        ("ReasoningPart", "a", [2]),
        ("ReasoningPart", "b", []),
        ("TextPart", "Yes", [6]),
        ("TextPart", " sir", [7]),
        ("TextPart", "!", [8, 9]),
    ]
    assert parser.num_reasoning_tokens == 5


def test_events_end_with_the_reason() -> None:
    assert events_of(PLAIN, ["a"], finish=FinishReason.LENGTH)[-1] == OutputEnd("length")
    assert joined(events_of(HERMES, [CALL], finish=FinishReason.LENGTH)).finish == "length"

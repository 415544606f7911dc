"""What a model server says becomes the events of every dialect, also where a ring begins or finishes the answer."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.api.core.answer import ChoiceReader
from exo_mesh.api.core.preparing import PreparedChoice, PreparedRequest
from exo_mesh.domain.request import FinishReason, GenerateRequest, TokenEvent
from exo_mesh.domain.whole.text_pieces import TextInput, TextPiece, TextUsage
from exo_mesh.text.output.events import (
    OutputEnd,
    OutputEvent,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from exo_mesh.text.tokenizer import TextModel
from exo_mesh.wire.driver_codec import event_from_proto, event_to_proto


def reader(stops: Sequence[str] = (), *, parallel: bool = True) -> ChoiceReader:
    request = GenerateRequest("r", (), 10, text=TextInput(b"{}"))
    text = TextModel.without_vocabulary("m")
    prepared = PreparedRequest("r", "m", text, (PreparedChoice(request),), tuple(stops), parallel_calls=parallel)
    return ChoiceReader(prepared)


def read(one: ChoiceReader, *items: TextPiece | FinishReason) -> list[OutputEvent]:
    found: list[OutputEvent] = []
    for index, item in enumerate(items):
        if isinstance(item, TextPiece):
            found += one.push(TokenEvent(index, None, piece=item))
        else:
            found += one.push(TokenEvent(index, None, finish=item, usage=TextUsage(7, 5)))
    return found


def test_text_and_reasoning_are_passed_on_and_the_counts_are_the_servers() -> None:
    one = reader()
    events = read(one, TextPiece("reasoning", "hm"), TextPiece("text", "yes"), FinishReason.STOP)
    assert events == [ReasoningPart("hm"), TextPart("yes"), OutputEnd("stop")]
    assert (one.num_tokens, one.num_prompt_tokens, one.finished) == (5, 7, True)


def test_a_stop_string_over_two_pieces_ends_the_answer_before_it() -> None:
    one = reader(["END"])
    assert read(one, TextPiece("text", "abE"), TextPiece("text", "NDc")) == [TextPart("ab"), OutputEnd("stop", "END")]
    assert one.finished


def test_a_stop_string_that_the_server_names_is_why_the_answer_ends() -> None:
    for said, expected in (("END", "END"), ("other", "")):
        one = reader(["END"])
        one.push(TokenEvent(0, None, piece=TextPiece("text", "ab")))
        end = TokenEvent(1, None, finish=FinishReason.STOP, usage=TextUsage(7, 5, said))
        assert one.push(event_from_proto(event_to_proto(end))) == [OutputEnd("stop", expected)]


def test_text_that_was_held_back_for_a_stop_string_comes_at_the_end() -> None:
    events = read(reader(["END"]), TextPiece("text", "abEN"), FinishReason.LENGTH)
    assert events == [TextPart("ab"), TextPart("EN"), OutputEnd("length")]


def test_tool_calls_begin_go_on_and_end() -> None:
    events = read(
        reader(),
        TextPiece("call", "", 0, "x", "look"),
        TextPiece("call", '{"a":', 0),
        TextPiece("call", "1}", 0),
        TextPiece("call", "{}", 1, "y", "go"),
        FinishReason.STOP,
    )
    assert events == [
        ToolCallBegin(0, "look"),
        ToolCallArguments(0, '{"a":'),
        ToolCallArguments(0, "1}"),
        ToolCallEnd(0),
        ToolCallBegin(1, "go"),
        ToolCallArguments(1, "{}"),
        ToolCallEnd(1),
        OutputEnd("tool_calls"),
    ]


def test_a_second_call_is_dropped_if_the_client_allows_one() -> None:
    pieces = TextPiece("call", "{}", 0, "x", "look"), TextPiece("call", "{}", 1, "y", "go")
    begun = [event for event in read(reader(parallel=False), *pieces) if isinstance(event, ToolCallBegin)]
    assert begun == [ToolCallBegin(0, "look")]

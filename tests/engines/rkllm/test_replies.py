"""What is read of single lines, of reasoning that is cut anywhere, and of arguments that are not JSON."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from exo_mesh_rkllm.answer import BoardAnswer
from exo_mesh_rkllm.replies import Chunk, is_not_loaded, read_chunks, refusal
from exo_mesh_rkllm.thinking import ThoughtSplitter
from exo_mesh_rkllm.tool_calls import MAX_ARGUMENTS, arguments_text
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_mesh.errors import EngineError, InputError, MeshError, ModelError, OverloadError


def split(text: str, cuts: list[int]) -> dict[str, str]:
    """The reasoning and the answer of a text that comes in pieces."""
    splitter, got, at = ThoughtSplitter(), {"reasoning": "", "text": ""}, 0
    for cut in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        for kind, part in splitter.push(text[at:cut]):
            got[kind] += part
        at = cut
    for kind, part in splitter.flush():
        got[kind] += part
    return got


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("plain text", "", "plain text"),
        ("  indented", "", "  indented"),
        ("<think>a b</think>c", "a b", "c"),
        ("\n<think>\n a\n b \n</think>\n\n c ", "a\n b", "c "),
        ("<think>\n\n</think>\n\nc", "", "c"),
        ("<think>never ends </thin", "never ends </thin", ""),
        ("<thin", "", "<thin"),
        ("a <think>b</think>", "", "a <think>b</think>"),
        ("<think>a</think><think>b</think>", "a", "<think>b</think>"),
        ("", "", ""),
        (" ", "", " "),
    ],
)
@given(cuts=st.lists(st.integers(0, 100), max_size=8))
def test_reasoning_is_found_however_the_text_is_cut(text: str, reasoning: str, answer: str, cuts: list[int]) -> None:
    assert split(text, cuts) == {"reasoning": reasoning, "text": answer}


def test_text_that_is_certain_is_passed_on_at_once() -> None:
    splitter = ThoughtSplitter()
    assert splitter.push("Hi") == [("text", "Hi")]
    assert splitter.push(" <") == [("text", " <")], "only the beginning of an answer can be reasoning"
    splitter = ThoughtSplitter()
    assert splitter.push("<think>go on") == [("reasoning", "go on")]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("abc äé,:{}[]", max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), json_values, max_size=4))
def test_arguments_without_quotes_survive_the_form_of_python(arguments: dict[str, Any]) -> None:
    broken = str(arguments).replace("'", '"')
    assert json.loads(arguments_text(broken)) == arguments
    assert json.loads(arguments_text(json.dumps(arguments))) == json.loads(arguments_text(arguments)) == arguments


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ('{"a": "it"s"}', {"a": "it's"}),
        ('{"a": "don"t, won"t", "b": None}', {"a": "don't, won't", "b": None}),
        ('{"a": "None"}', {"a": "None"}),
        (None, {}),
    ],
)
def test_an_apostrophe_between_letters_is_one(sent: str | None, read: dict[str, Any]) -> None:
    assert json.loads(arguments_text(sent)) == read


@pytest.mark.parametrize("sent", ['{"a": "say "x" now"}', '{"a": ', "[1]", "text", 7, "x" * (MAX_ARGUMENTS + 1)])
def test_arguments_that_can_be_read_in_several_ways_are_refused(sent: Any) -> None:
    with pytest.raises(EngineError, match="arguments"):
        arguments_text(sent)


@pytest.mark.parametrize("line", [b"", b"\r\n", b": ping", b"event: x", b"data: [DONE]", b"data:"])
def test_lines_without_content_are_skipped(line: bytes) -> None:
    assert read_chunks(line) == ()


@pytest.mark.parametrize(
    ("value", "chunk"),
    [
        ({"message": {"content": "a"}, "done": False}, Chunk("a")),
        ({"message": {"content": "", "thinking": "b"}, "done": False}, Chunk(reasoning="b")),
        (
            {"response": "a", "done": True, "eval_count": 3, "eval_duration": 1},
            Chunk("a", is_end=True, output_tokens=3),
        ),
        (
            {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 0}},
            Chunk(is_token=False, prompt_tokens=2),
        ),
        ({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}, Chunk("a", is_end=True)),
        ({"choices": [{"role": "assistant", "content": "a", "finish_reason": None}]}, Chunk("a")),
        ({"choices": [{"delta": {"reasoning_content": "r"}, "finish_reason": None}]}, Chunk(reasoning="r")),
    ],
)
def test_a_line_is_read_by_its_keys(value: dict[str, Any], chunk: Chunk) -> None:
    assert read_chunks(json.dumps(value).encode()) == (chunk,)
    assert read_chunks(b"data: " + json.dumps(value).encode()) == (chunk,)


def test_the_tokens_of_a_whole_answer_are_chunks_and_an_end() -> None:
    a, b, end = read_chunks(b'{"tokens": ["a", "b"]}')
    assert (a.text, b.text, end.is_end, end.is_token) == ("a", "b", True, False)
    with pytest.raises(EngineError, match="token ids without their text"):
        read_chunks(b'{"tokens": [1, 2]}')


@pytest.mark.parametrize(
    "line",
    [b"{", b"[1]", b'"x"', b'{"choices": 7}', b'{"choices": [7]}', b'{"message": null}', b'{"tokens": null}', b"{}",
     b'{"message": {"content": "", "tool_calls": [{}]}}', b"\xff"],
)  # fmt: skip
def test_a_line_of_another_form_is_an_engine_error(line: bytes) -> None:
    with pytest.raises(EngineError):
        read_chunks(line)


KEYS = (
    "message", "content", "thinking", "tool_calls", "function", "name", "arguments", "id", "done", "response", "tokens",
    "choices", "delta", "text", "usage", "finish_reason", "reasoning_content", "eval_count", "eval_duration", "error",
    "detail",
)  # fmt: skip
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.just("<think>"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), anything, max_size=5), max_size=4))
def test_whatever_a_server_sends_is_an_answer_or_one_of_our_errors(values: list[dict[str, Any]]) -> None:
    answer = BoardAnswer(2, ("a",), context_limit=3)
    with contextlib.suppress(MeshError):
        pieces = [
            piece
            for value in values
            for chunk in read_chunks(json.dumps(value).encode())
            for piece in answer.push(chunk)
        ]
        pieces += answer.flush()
        answer.end()
        assert all(type(part) is str for piece in pieces for part in (piece.text, piece.name, piece.call_id))
        assert all(piece.text for piece in pieces)


def test_an_error_in_a_stream_is_that_error() -> None:
    with pytest.raises(ModelError, match="Model directory 'x' not found"):
        read_chunks(b"{\"error\": \"Failed to load model 'x': Model directory 'x' not found.\"}")


@pytest.mark.parametrize(
    ("status", "value", "kind"),
    [
        (500, {"error": "boom"}, EngineError),
        (500, {"error": {"message": "boom", "code": 500}}, EngineError),
        (400, {"error": "Missing messages"}, InputError),
        (422, {"detail": "bad"}, InputError),
        (404, {"error": "Model 'x' not found"}, ModelError),
        (503, "", OverloadError),
        (429, {}, OverloadError),
        (502, "<html>", EngineError),
    ],
)
def test_a_refusal_has_the_error_that_helps(status: int, value: Any, kind: type[MeshError]) -> None:
    found = refusal(status, value)
    assert type(found) is kind and "RKLLAMA" in str(found)


def test_a_message_of_the_server_is_bounded_and_printable() -> None:
    assert len(str(refusal(500, {"error": "x" * 10_000}))) < 400
    assert "\x1b" not in str(refusal(500, {"error": "\x1b[2J"}))
    assert is_not_loaded(refusal(400, {"error": "No model is currently loaded."}))

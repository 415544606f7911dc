"""What is sent to each kind of server, what comes back as pieces, and how a begun answer goes on."""

from __future__ import annotations

from typing import Any

import pytest
from exo_mesh_openai.answer import MAX_CALLS, AnswerReader
from exo_mesh_openai.body import sampling_fields
from exo_mesh_openai.kinds import KINDS, LLAMA_SERVER, LM_STUDIO, OLLAMA, OTHER, SGLANG, VLLM, ServerKind

from exo_mesh.domain.request import FinishReason, SamplingParams
from exo_mesh.domain.whole.text_pieces import TextPiece, TextUsage
from exo_mesh.errors import EngineError, InputError
from tests.support.fake_openai import KEY, FakeModelServer
from tests.support.openai_engine import GREEDY, chat, collect, joined, loaded_from


async def test_text_reasoning_and_token_counts_are_passed_on() -> None:
    async with loaded_from(FakeModelServer("vllm")) as engine:
        pieces, end = await collect(engine, chat("think of a short answer", max_tokens=50))
    assert joined(pieces, "reasoning") == "".join(f"t{number} " for number in range(8))
    assert [piece.kind for piece in pieces] == ["reasoning"] * 8 + ["text"] * 3
    assert (end.reason, end.usage) == (FinishReason.STOP, TextUsage(7, 11))


@pytest.mark.parametrize("question", ["call them", "call them with one index"])
async def test_tool_calls_are_numbered_and_named_once(question: str) -> None:
    async with loaded_from(FakeModelServer("vllm")) as engine:
        pieces, end = await collect(engine, chat(question, tools=[{"type": "function"}]))
    begins = [TextPiece("call", "", number, f"id-{number}", name) for number, name in enumerate(("look", "listen"))]
    assert [piece for piece in pieces if piece.name] == begins
    for number in (0, 1):
        assert "".join(piece.text for piece in pieces if piece.call == number) == f'{{"at": {number}}}'
    assert end.reason is FinishReason.STOP


async def test_what_the_client_asked_is_sent_and_nothing_else() -> None:
    server = FakeModelServer("vllm")
    asked = {
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "response_format": {"type": "json_object"},
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    async with loaded_from(server) as engine:
        await collect(engine, chat("short", stops=["END"], **asked, unknown=1, user="me"))
    ((path, body),) = server.requests
    assert path == "/v1/chat/completions"
    sampling = {
        "temperature": 0.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 0, "top_k": -1,
        "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert body == {
        **asked, **sampling, "messages": [{"role": "user", "content": "short"}], "model": "fake-model", "stream": True,
        "stream_options": {"include_usage": True}, "max_tokens": 12, "stop": ["END"],
    }  # fmt: skip


async def test_the_key_is_sent_with_each_request(tmp_path: Any) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    server = FakeModelServer("vllm", frozenset({"needs-key"}))
    async with loaded_from(server, key_file=str(path)) as engine:
        await collect(engine, chat())
        await engine.check()
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


FULL = SamplingParams(0.5, 40, 0.9, 0.05, 1.1, 0.2, 0.3, ((7, -100.0),), seed=2**40 + 5)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (LLAMA_SERVER, {"top_k": 40, "min_p": 0.05, "repeat_penalty": 1.1, "repeat_last_n": 1 << 16}),
        (VLLM, {"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}),
        (SGLANG, {"top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_sampling_parameters_have_the_names_of_each_server(kind: ServerKind, own: dict[str, Any]) -> None:
    assert sampling_fields(kind, FULL) == {
        "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 5,
        "logit_bias": {"7": -100.0}, **own,
    }  # fmt: skip


def test_llama_server_looks_back_as_far_as_the_request_says() -> None:
    sampling = SamplingParams(repetition_penalty=1.1, repetition_window=64)
    assert sampling_fields(LLAMA_SERVER, sampling)["repeat_last_n"] == 64


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_parameters_that_are_off_are_refused_by_no_server(kind: ServerKind) -> None:
    assert {"temperature", "top_p", "seed"} <= sampling_fields(kind, SamplingParams()).keys()


@pytest.mark.parametrize(
    ("kind", "sampling", "param"),
    [
        (OLLAMA, SamplingParams(top_k=40), "top_k"),
        (OLLAMA, SamplingParams(logit_bias=((7, 1.0),)), "logit_bias"),
        (LM_STUDIO, SamplingParams(min_p=0.1), "min_p"),
        (OTHER, SamplingParams(repetition_penalty=1.1), "repetition_penalty"),
        (VLLM, SamplingParams(logprobs=3), "logprobs"),
        (VLLM, SamplingParams(repetition_penalty=1.1, repetition_window=64), "repeat_last_n"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_parameter_that_a_server_does_not_know_is_refused(
    kind: ServerKind, sampling: SamplingParams, param: str
) -> None:
    with pytest.raises(InputError) as caught:
        sampling_fields(kind, sampling)
    assert caught.value.param == param and param in str(caught.value)


async def test_template_variables_are_refused_where_they_would_be_ignored() -> None:
    async with loaded_from(FakeModelServer("ollama")) as engine:
        with pytest.raises(InputError, match="chat_template_kwargs"):
            await collect(engine, chat(chat_template_kwargs={"enable_thinking": False}))


async def test_llama_server_gets_the_reasoning_effort_for_its_template() -> None:
    server = FakeModelServer("llama-server")
    async with loaded_from(server) as engine:
        await collect(engine, chat(reasoning_effort="high"))
    assert server.requests[0][1]["chat_template_kwargs"] == {"reasoning_effort": "high"}


@pytest.mark.parametrize(
    ("kind", "switches", "slots", "continues"),
    [("llama-server", set(), 3, True), ("llama-server", {"no-prefill"}, 3, False), ("vllm", set(), 64, True),
     ("sglang", set(), 64, True), ("ollama", set(), 4, False), ("lm-studio", set(), 4, False),
     ("other", set(), 4, False)],
)  # fmt: skip
async def test_slots_and_continuing_are_found_when_a_model_is_loaded(
    kind: str, switches: set[str], slots: int, continues: bool
) -> None:
    async with loaded_from(FakeModelServer(kind, frozenset(switches))) as engine:
        assert (engine.slots, engine.continues) == (slots, continues)
    async with loaded_from(FakeModelServer(kind, frozenset(switches)), slots="2") as engine:
        assert engine.slots == (3 if kind == "llama-server" else 2), "what the server says goes first"


@pytest.mark.parametrize("kind", ["llama-server", "vllm", "sglang"])
async def test_a_begun_chat_goes_on_after_its_beginning(kind: str) -> None:
    server = FakeModelServer(kind)
    async with loaded_from(server) as engine:
        pieces, _ = await collect(engine, chat(max_tokens=12))
        whole, text = joined(pieces), joined(pieces[:4])
        begun = [TextPiece("text", text[:5]), TextPiece("text", text[5:])]
        rest, end = await collect(engine, chat(max_tokens=12, begun=begun))
    num_begun = 2 if kind == "sglang" else 4  # the fake of SGLang does not count: each piece is taken for a token
    assert (text + joined(rest)).startswith(whole) and len(rest) == 12 - num_begun
    assert end.usage == TextUsage(7 - num_begun, 12), "the whole answer is counted"
    body = server.requests[-1][1]
    assert body["messages"][-1] == {"role": "assistant", "content": text}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert body["max_tokens"] == 12 - num_begun


async def test_a_begun_thought_is_continued_by_a_server_that_can() -> None:
    async with loaded_from(FakeModelServer("llama-server")) as engine:
        whole, _ = await collect(engine, chat("think", max_tokens=12))
        rest, _ = await collect(engine, chat("think", max_tokens=12, begun=whole[:3]))
    assert [*whole[:3], *rest] == whole


@pytest.mark.parametrize("kind", ["vllm", "ollama"])
@pytest.mark.parametrize("question", ["think", "call"])
async def test_a_begun_thought_or_call_is_computed_again_and_not_repeated(kind: str, question: str) -> None:
    async with loaded_from(FakeModelServer(kind)) as engine:
        whole, end = await collect(engine, chat(question, max_tokens=12))
        rest, rest_end = await collect(engine, chat(question, max_tokens=12, begun=whole[:4]))
    assert [*whole[:4], *rest] == whole
    assert rest_end.reason is end.reason


async def test_after_a_complete_thought_the_text_is_continued_without_thinking() -> None:
    server = FakeModelServer("vllm")
    async with loaded_from(server) as engine:
        whole, _ = await collect(engine, chat("think", max_tokens=12))
        rest, _ = await collect(engine, chat("think", max_tokens=12, begun=whole[:10]))
    assert [*whole[:10], *rest] == whole
    assert server.requests[-1][1]["chat_template_kwargs"] == {"enable_thinking": False}


async def test_a_server_that_refuses_to_continue_is_asked_for_the_whole_answer() -> None:
    server = FakeModelServer("vllm", frozenset({"no-prefill"}))
    async with loaded_from(server) as engine:
        whole, _ = await collect(engine, chat(max_tokens=12))
        rest, end = await collect(engine, chat(max_tokens=12, begun=whole[:4]))
    assert [*whole[:4], *rest] == whole
    assert end.reason is FinishReason.LENGTH and len(server.requests) == 3


async def test_a_begun_prompt_goes_on_after_its_beginning() -> None:
    from msgspec.structs import replace

    server = FakeModelServer("vllm")
    async with loaded_from(server) as engine:
        request = replace(chat(), body={"prompt": "Once upon a time"})
        whole = joined((await collect(engine, request))[0])
        rest = joined((await collect(engine, replace(request, begun=(TextPiece("text", whole[:9]),))))[0])
    assert (whole[:9] + rest).startswith(whole)
    assert server.requests[-1][1]["prompt"] == "Once upon a time" + whole[:9]


@pytest.mark.parametrize("begun", ["", "one two three "])
async def test_a_limit_that_is_reached_already_asks_for_nothing(begun: str) -> None:
    server = FakeModelServer("vllm")
    request = chat(max_tokens=3 if begun else 0, begun=[TextPiece("text", begun)] if begun else [])
    async with loaded_from(server) as engine:
        pieces, end = await collect(engine, request)
    assert (pieces, end.reason, server.requests) == ([], FinishReason.LENGTH, [])
    assert end.usage.output_tokens == request.max_tokens


async def test_an_answer_that_begins_differently_when_asked_again_is_an_error() -> None:
    async with loaded_from(FakeModelServer("ollama")) as engine:
        with pytest.raises(EngineError, match="did not repeat"):
            await collect(engine, chat(begun=[TextPiece("text", "another answer")]))


async def test_an_answer_that_ends_earlier_when_asked_again_is_an_error() -> None:
    async with loaded_from(FakeModelServer("ollama")) as engine:
        begun, _ = await collect(engine, chat(max_tokens=12))
        with pytest.raises(EngineError, match="did not repeat"):
            await collect(engine, chat(max_tokens=8, begun=begun))


@pytest.mark.parametrize(
    "chunk",
    ["[]", "7", "{}", '{"choices": {}}', '{"choices": [1]}', '{"choices": [{"delta": 1}]}',
     '{"choices": [{"delta": {"content": 1}}]}', '{"choices": [{"delta": {"tool_calls": "x"}}]}',
     '{"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}',
     '{"choices": [{"delta": {}, "finish_reason": "content_filter"}]}', "[" * 100_000],
    ids=lambda chunk: chunk[:40],
)  # fmt: skip
def test_a_chunk_of_another_form_is_an_engine_error(chunk: str) -> None:
    with pytest.raises(EngineError):
        AnswerReader("box:1").read(chunk)


def test_the_error_for_a_chunk_says_who_sent_it_and_which_form_it_lacks() -> None:
    with pytest.raises(EngineError, match="the model server sent a stream chunk that is not a JSON object"):
        AnswerReader("box:1").read("[]")


@pytest.mark.parametrize(
    ("of_choice", "of_chunk", "stop_string"),
    [
        ('"stop_reason": "END"', "", "END"),
        ('"matched_stop": "END"', "", "END"),
        ('"stop_reason": null', ', "stopping_word": "END"', "END"),
        ('"stop_reason": 128009', "", ""),
        ('"matched_stop": null', ', "stopping_word": ""', ""),
    ],
    ids=["vllm", "sglang", "llama-server", "a token", "none"],
)
def test_the_stop_string_that_ended_an_answer_is_read(of_choice: str, of_chunk: str, stop_string: str) -> None:
    reader = AnswerReader("box:1")
    reader.read(f'{{"choices": [{{"delta": {{}}, "finish_reason": "stop", {of_choice}}}]{of_chunk}}}')
    assert (reader.finish, reader.stop_string) == (FinishReason.STOP, stop_string)


def test_endless_tool_calls_are_refused() -> None:
    reader = AnswerReader("box:1")
    with pytest.raises(EngineError, match=f"more than {MAX_CALLS}"):
        for number in range(MAX_CALLS + 1):
            reader.read(
                f'{{"choices": [{{"delta": {{"tool_calls": [{{"index": {number}, "function": {{"name": "f"}}}}]}}}}]}}'
            )


def test_both_names_of_reasoning_are_read_once() -> None:
    chunk = '{"choices": [{"delta": {"reasoning": "a", "reasoning_content": "a", "content": null}}]}'
    assert AnswerReader("box:1").read(chunk) == [TextPiece("reasoning", "a")]


def test_greedy_is_greedy_everywhere() -> None:
    assert all(sampling_fields(kind, GREEDY)["temperature"] == 0.0 for kind in KINDS)


@pytest.mark.parametrize(("kind", "sent"), [("other", 4), ("vllm", 6)])
async def test_stop_strings_beyond_what_a_server_takes_are_left_to_the_caller(kind: str, sent: int) -> None:
    server = FakeModelServer(kind)
    async with loaded_from(server) as engine:
        await collect(engine, chat(stops=[f"stop {number}" for number in range(6)]))
    assert server.requests[0][1]["stop"] == [f"stop {number}" for number in range(sent)]

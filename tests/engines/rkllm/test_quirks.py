"""Each habit of RKLLAMA that differs from other servers, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from exo_mesh.domain.request import FinishReason
from exo_mesh.errors import EngineError, ModelError, StageLostError
from tests.engines.rkllm.asking import DIALECTS, Got, answer, begin, chat, loaded
from tests.support.fake_rkllama import MODELS, TODAY, FakeRkllama, Quirk, tokens_of

QUESTION = "Tell me of the hill."
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


async def ask(*quirks: Quirk, request: Any = None, dialect: str = "ollama", **options: Any) -> Got:
    async with loaded(FakeRkllama(quirks, dialect), **options) as engine:
        return await answer(engine, request or chat(QUESTION))


async def test_a_model_that_is_loaded_already_is_loaded() -> None:
    fake = FakeRkllama({Quirk.ALREADY_LOADED}, loaded={MODELS[0]})
    async with loaded(fake) as engine:
        assert (await answer(engine, chat("say: x"))).text() == "x"
    assert fake.loads == []


@pytest.mark.parametrize(("before", "loads"), [(MODELS[1], [MODELS[0]]), (MODELS[0], []), ("", [MODELS[0]])])
async def test_an_old_server_makes_room_for_the_model(before: str, loads: list[str]) -> None:
    fake = FakeRkllama({Quirk.ONE_MODEL}, "native", loaded={before} if before else set())
    async with loaded(fake) as engine:
        assert (await answer(engine, chat("say: x"))).text() == "x"
    assert (fake.loads, fake.loaded) == (loads, {MODELS[0]})


@pytest.mark.parametrize("quirk", [Quirk.UNKNOWN_IS_500, Quirk.DETAILS])
@pytest.mark.parametrize("dialect", ["ollama", "openai"])
async def test_a_model_that_was_removed_is_a_model_error(dialect: str, quirk: Quirk) -> None:
    fake = FakeRkllama({quirk}, dialect)
    async with loaded(fake) as engine:
        fake.models = MODELS[1:]
        with pytest.raises(ModelError, match=r"Model directory 'Qwen3-1\.7B' not found"):
            await answer(engine, chat(QUESTION))
        with pytest.raises(EngineError, match=r"no model Qwen3-1\.7B any more"):
            await engine.check()


async def test_a_limit_that_the_server_ignores_is_kept_and_the_next_answer_is_whole() -> None:
    fake = FakeRkllama({Quirk.IGNORES_LIMIT, Quirk.GOES_ON, Quirk.LEAVES_REST})
    async with loaded(fake) as engine:
        assert [piece.text for piece in (await answer(engine, chat(QUESTION, 4))).pieces] == tokens_of(QUESTION)[:4]
        assert (await answer(engine, chat("say: next"))).text() == "next"


@pytest.mark.parametrize("quirks", [(), (Quirk.STOP_AT_LIMIT,)])
async def test_the_limit_is_told_from_an_end_by_counting(quirks: tuple[Quirk, ...]) -> None:
    assert (await ask(*quirks, request=chat(QUESTION, 4))).reason is FinishReason.LENGTH
    assert (await ask(*quirks, request=chat("say: one two three", 4))).reason is FinishReason.STOP


async def test_an_id_for_each_event_makes_no_difference() -> None:
    assert (await ask(Quirk.NEW_IDS, dialect="openai")).text() == "".join(tokens_of(QUESTION))


@pytest.mark.parametrize("dialect", ["ollama", "openai"])
async def test_tool_calls_are_passed_through_with_their_numbers(dialect: str) -> None:
    request = chat('call: look_up {"word": "rain"} ; look_up {"word": "stone"}', tools=TOOLS)
    got = await ask(Quirk.HOLDS_TOOLS, request=request, dialect=dialect)
    ids = ("call_0", "call_1") if dialect == "openai" else ("", "")
    calls = [(0, ids[0], "look_up", '{"word": "rain"}'), (1, ids[1], "look_up", '{"word": "stone"}')]
    assert (got.calls, got.text(), got.reason) == (calls, "", FinishReason.STOP)


async def test_a_text_that_was_held_for_tools_comes_after_all() -> None:
    assert (await ask(Quirk.HOLDS_TOOLS, request=chat(QUESTION, tools=TOOLS))).text() == "".join(tokens_of(QUESTION))


async def test_one_call_is_passed_on_if_the_client_wants_no_more() -> None:
    request = chat("call: look_up {} ; look_up {}", tools=TOOLS, parallel_tool_calls=False)
    assert [call[0] for call in (await ask(request=request)).calls] == [0]


async def test_no_tool_is_offered_if_the_client_wants_none() -> None:
    got = await ask(request=chat("call: look_up {}", tools=TOOLS, tool_choice="none"))
    assert not got.calls


async def test_arguments_in_the_form_of_python_become_json_where_they_can_be_read_in_one_way() -> None:
    request = chat('call: look_up {"is": true, "no": null, "text": "it\'s True"}', tools=TOOLS)
    got = await ask(Quirk.PYTHON_ARGUMENTS, request=request, dialect="openai")
    assert got.calls[0][3] == '{"is": true, "no": null, "text": "it\'s True"}'
    with pytest.raises(EngineError, match="several ways"):
        await ask(
            Quirk.PYTHON_ARGUMENTS, request=chat('call: look_up {"a": "x \\"y\\" z"}', tools=TOOLS), dialect="openai"
        )


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_reasoning_comes_apart_from_the_answer(dialect: str) -> None:
    got = await ask(Quirk.THINKS, request=chat("say: one two"), dialect=dialect)
    assert (got.text("reasoning"), got.text()) == ("Let me see.", "one two")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_words_of_a_timeout_are_an_error_and_no_answer(dialect: str) -> None:
    with pytest.raises(EngineError, match="its own timeout"):
        await ask(Quirk.ABORT_TEXT, dialect=dialect)


async def test_an_answer_without_statistics_was_given_up() -> None:
    with pytest.raises(EngineError, match="its own timeout"):
        await ask(Quirk.ABORT_SILENT)


async def test_a_model_may_write_about_timeouts() -> None:
    text = "Aborted inference by Timeout is what it says."
    assert (await ask(request=chat(f"say: {text}"))).text() == text


@pytest.mark.parametrize("quirks", [{Quirk.GOES_ON}, {Quirk.GOES_ON, Quirk.LEAVES_REST}, {Quirk.LEAVES_REST}])
async def test_after_a_cancelled_answer_the_next_one_has_no_rest_of_it(quirks: set[Quirk]) -> None:
    fake = FakeRkllama(quirks, token_s=0.002)
    async with loaded(fake) as engine:
        await begin(engine.generate(chat(QUESTION)))
        assert (await answer(engine, chat("say: next one"))).text() == "next one"
    assert fake.most_running == 1


async def test_a_model_that_was_unloaded_is_loaded_again() -> None:
    fake = FakeRkllama({Quirk.UNLOADS}, "native")
    async with loaded(fake) as engine:
        for _ in range(3):
            assert (await answer(engine, chat("say: here"))).text() == "here"
    assert len(fake.loads) > 1


async def test_an_answer_that_never_begins_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(EngineError, match=r"did not begin its answer within 0\.05 s.*first_token_s"):
        await ask(Quirk.NEVER_BEGINS, first_token_s="0.05", free_s=0.05)


async def test_an_answer_that_never_ends_is_an_error() -> None:
    async with loaded(FakeRkllama(token_s=0.02), answer_s="0.2") as engine:
        with pytest.raises(EngineError, match=r"did not end its answer within 0\.2 s"):
            await answer(engine, chat(QUESTION))


@pytest.mark.parametrize("dialect", ["ollama", "openai", "native"])
async def test_a_connection_that_breaks_is_a_lost_stage_and_what_came_stands(dialect: str) -> None:
    pieces = []
    async with loaded(FakeRkllama({Quirk.DIES}, dialect)) as engine:
        with pytest.raises(StageLostError):
            async for piece in engine.generate(chat(QUESTION)):
                pieces.append(piece)
    assert [getattr(piece, "text", "") for piece in pieces] == tokens_of(QUESTION)[: len(pieces)]


@pytest.mark.parametrize(("quirk", "said"), [(Quirk.GARBAGE, "not JSON"), (Quirk.ENDLESS_LINE, "a line of more")])
async def test_bytes_that_are_no_answer_are_an_error(quirk: Quirk, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        await ask(quirk)


async def test_a_gguf_model_is_answered_by_llama_servers_events() -> None:
    got = await ask(Quirk.GGUF, request=chat("say: one two three", 2))
    assert (got.text(), got.reason) == ("one two", FinishReason.LENGTH)


def test_every_quirk_has_a_test() -> None:
    named = {name for name in vars(Quirk) if name.isupper()}
    here = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert {name for name in named if f"Quirk.{name}" in here} == named
    assert named >= {quirk.name for quirk in TODAY}

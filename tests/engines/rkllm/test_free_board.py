"""After an answer that nobody wants any more: the board is free when the server has ended it, not before."""

from __future__ import annotations

import asyncio
import sys

import pytest
from exo_mesh_rkllm.board_lock import BoardLock

from exo_mesh.errors import EngineError, MeshError, OverloadError, StageLostError
from tests.engines.rkllm.asking import answer, begin, chat, loaded, loaded_at
from tests.support.fake_rkllama import MODELS, TODAY, FakeRkllama, Quirk, serving

QUESTION = "Tell me of the lamp."


async def test_a_request_that_waits_too_long_for_the_board_is_refused_and_a_later_one_served() -> None:
    async with loaded(FakeRkllama(token_s=0.01), free_s=0.05) as engine:
        await begin(engine.generate(chat(QUESTION)))
        with pytest.raises(OverloadError, match="that was cancelled"):
            await answer(engine, chat("say: early"))
        async with asyncio.timeout(10):
            while True:
                try:
                    got = await answer(engine, chat("say: late"))
                    break
                except OverloadError:
                    pass
    assert got.text() == "late"


async def test_an_answer_whose_rest_nobody_could_read_makes_the_model_load_again() -> None:
    fake = FakeRkllama(TODAY, token_s=0.02)
    async with loaded(fake, answer_s="0.2") as engine:
        with pytest.raises(EngineError, match="did not end"):
            await answer(engine, chat(QUESTION))
        fake.token_s = 0.0
        assert (await answer(engine, chat("say: fresh"))).text() == "fresh"
    assert fake.loads == [MODELS[0]] * 2


async def test_an_engine_that_closes_in_the_middle_of_an_answer_ends_the_servers_process() -> None:
    fake = FakeRkllama(TODAY, token_s=0.02)
    async with loaded(fake) as engine:
        await begin(engine.generate(chat(QUESTION)))
    assert fake.loaded == set() and fake.num_running == 0


async def test_an_engine_that_closes_between_answers_leaves_the_model_loaded() -> None:
    fake = FakeRkllama()
    async with loaded(fake) as engine:
        await answer(engine, chat("say: x"))
    assert fake.loaded == {MODELS[0]}


async def test_after_a_lost_connection_the_model_is_loaded_again() -> None:
    fake = FakeRkllama({Quirk.DIES})
    async with loaded(fake) as engine:
        with pytest.raises(StageLostError):
            await answer(engine, chat(QUESTION))
        fake.quirks = TODAY
        assert (await answer(engine, chat("say: back"))).text() == "back"
    assert fake.loads == [MODELS[0]] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="boards run Linux")
async def test_two_models_of_a_board_compute_one_after_the_other() -> None:
    fake = FakeRkllama(token_s=0.002)
    async with (
        serving(fake) as address,
        loaded_at(address) as first,
        loaded_at(address, model=MODELS[1]) as second,
    ):
        got = await asyncio.gather(answer(first, chat("say: a b c")), answer(second, chat("say: x y z")))
        assert [one.text() for one in got] == ["a b c", "x y z"]
        await begin(first.generate(chat(QUESTION)))
        assert (await answer(second, chat("say: later"))).text() == "later", "after the cancelled answer has ended"
    assert fake.most_running == 1


@pytest.mark.skipif(sys.platform != "linux", reason="boards run Linux")
async def test_a_board_that_another_model_uses_for_long_is_busy() -> None:
    fake = FakeRkllama(token_s=0.02)
    async with (
        serving(fake) as address,
        loaded_at(address) as first,
        loaded_at(address, model=MODELS[1], free_s=0.05) as second,
    ):
        await begin(first.generate(chat(QUESTION)))
        with pytest.raises(OverloadError, match="for another model"):
            await answer(second, chat("say: early"))


async def test_every_end_of_an_answer_frees_the_board_for_others() -> None:
    fake = FakeRkllama()
    async with serving(fake) as address, loaded_at(address) as engine:
        lock, other = BoardLock(address), BoardLock(address)
        for quirk in (Quirk.GARBAGE, Quirk.DIES, Quirk.ABORT_TEXT):
            fake.quirks = {quirk}
            with pytest.raises(MeshError):
                await answer(engine, chat(QUESTION))
        fake.quirks = TODAY
        assert (await answer(engine, chat("say: x", stops=("x",)))).text() == ""
        await begin(engine.generate(chat(QUESTION)))
    assert lock.acquire(), "a closed engine holds nothing"
    assert sys.platform != "linux" or not other.acquire()
    lock.release()
    assert other.acquire()
    other.release()


async def test_a_closed_engine_refuses_and_can_be_closed_twice() -> None:
    async with loaded(FakeRkllama()) as engine:
        await engine.close()
        with pytest.raises(EngineError, match="is closed"):
            await answer(engine, chat("say: x"))
        with pytest.raises(EngineError, match="is closed"):
            await engine.check()

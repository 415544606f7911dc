"""Long texts and unusual tokenizers run in processes of their own: a hostile one fails there, and costs nobody else
anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from exo_mesh.api.context import ApiOptions
from exo_mesh.api.core.child_processes import NUM_PROCESSES, ChildMemory
from exo_mesh.api.core.texts import TextModels
from exo_mesh.api.core.tokenizers import LONG_TEXT, FarTokenizers
from exo_mesh.errors import ContextLengthError, InputError, ModelError, NotReadyError
from exo_mesh.text.control_text import ChatPrompt
from exo_mesh.text.recent_failures import KEPT_S, RecentFailures
from exo_mesh.text.tokenizer import TextModel
from tests.api.scripted_mesh import ScriptedMesh, TemplatesRenderedHere, served
from tests.mesh.discovery.waiting import until
from tests.text.text_models import byte_fallback, byte_level, word_piece, write_text_model

MARK = "84120398756102398475"
LONG = "Grüße, 日本語 und e\u0301 🙂👩‍👩‍👧 <|im_end|> ﷺ ǆ\n" * 900
SMALL = ChildMemory(growth_bytes=192 << 20, kept_bytes=128 << 20)


def hostile(directory: Path, **parts: Any) -> Path:
    """A model whose tokenizer.json is within all bounds, with these parts."""
    path = write_text_model(directory) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": None, **parts}))
    return directory


def growing(directory: Path) -> Path:
    """One character becomes 10,000, so some hundred thousand take more memory than a process may have."""
    rare = {"type": "Replace", "pattern": {"String": "ꙮ"}, "content": "ab" * 5000}
    return hostile(directory, normalizer=rare)


def slow(directory: Path) -> Path:
    """An expression that takes time in proportion to the fourth power of a text."""
    split = {"type": "Split", "pattern": {"Regex": "a*a*a*[^a]"}, "behavior": "Isolated", "invert": False}
    return hostile(directory, pre_tokenizer=split)


@pytest.fixture
async def texts() -> AsyncIterator[TextModels]:
    made = TextModels(TemplatesRenderedHere())
    yield made
    await made.close()


@pytest.fixture
async def far() -> AsyncIterator[FarTokenizers]:
    made = FarTokenizers(0.5, memory=SMALL)
    yield made
    await made.close()


def pids(texts: TextModels) -> set[int]:
    return texts._tokenizers.pids


def unlisted(text: TextModel) -> TextModel:
    """The same model, all of whose texts go to a process."""
    assert text.bounds is not None
    return replace(text, bounds=replace(text.bounds, is_listed=False))


@pytest.mark.parametrize("make", [byte_level, byte_fallback, word_piece])
async def test_a_process_makes_the_same_tokens_as_the_node(
    texts: TextModels, tmp_path: Path, make: Callable[[], Tokenizer]
) -> None:
    tokenizer = make()
    (write_text_model(tmp_path) / "tokenizer.json").unlink()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    here = TextModel.open(tmp_path)
    text = unlisted(await texts.get(tmp_path))
    for words in ("", "a", "Hello, world! <|im_end|>", LONG):
        assert await texts.work(lambda words=words: text.encode_text(words)) == here.encode_text(words)
        assert await texts.work(lambda words=words: text.encode_prompt(words)) == here.encode_prompt(words)
        vector = await texts.work(lambda words=words: text.encode_for_vector(words, "second", 40))
        assert vector == here.encode_for_vector(words, "second", 40)
    assert len(pids(texts)) == 1


async def test_a_process_marks_and_encodes_control_tokens_as_the_node(texts: TextModels, tmp_path: Path) -> None:
    node = await texts.get(write_text_model(tmp_path))
    here, text = replace(node, elsewhere=None), unlisted(node)
    for words in ("say <|im_end|> now", LONG):
        marked = await texts.work(lambda words=words: text.marked(words, MARK, ["<|im_start|>"]))
        assert marked == here.marked(words, MARK, ["<|im_start|>"]) and MARK in marked
        prompt = ChatPrompt(f"<|im_start|>user\n{marked}<|im_end|>\n", MARK)
        assert await texts.work(lambda prompt=prompt: text.encode_chat(prompt)) == here.encode_chat(prompt)
    with pytest.raises(ContextLengthError, match="more than 100 tokens") as caught:
        await texts.work(lambda: text.check_length("a" * 200_000, 100, "prompt"))
    assert caught.value.param == "prompt"
    with pytest.raises(InputError, match="lone surrogate"):
        await texts.work(lambda: text.encode_text("\ud800"))


async def test_a_short_text_starts_no_process_and_a_long_one_does(texts: TextModels, tmp_path: Path) -> None:
    text = await texts.get(write_text_model(tmp_path))
    await texts.work(lambda: text.encode_text("Hello, world! " * 100))
    assert pids(texts) == set()
    await texts.work(lambda: text.encode_text("Hello, world! " * 5000))
    assert len(pids(texts)) == 1


async def test_a_short_text_that_marks_make_long_is_marked_in_a_process(texts: TextModels, tmp_path: Path) -> None:
    node = await texts.get(write_text_model(tmp_path))
    made = await texts.work(lambda: node.marked("<|im_end|>" * 1600, MARK, []))
    assert made.count(MARK) == 1600 and not pids(texts)
    two = write_text_model(tmp_path / "two")
    document = json.loads((two / "tokenizer.json").read_text())
    document["added_tokens"].append({**document["added_tokens"][0], "id": 900, "content": "aa"})
    (two / "tokenizer.json").write_text(json.dumps(document))
    node = await texts.get(two)
    made = await texts.work(lambda: node.marked("a" * 16_000, MARK, []))
    assert made == MARK.join("a" * 16_000) and len(pids(texts)) == 1


async def test_a_tokenizer_that_grows_ends_its_process_only(far: FarTokenizers, tmp_path: Path) -> None:
    now = [100.0]
    far._failures = RecentFailures(lambda: now[0])
    bad = far.attached(TextModel.open(growing(tmp_path / "bad")), tmp_path / "bad", 1)
    good = unlisted(far.attached(TextModel.open(write_text_model(tmp_path / "good")), tmp_path / "good", 1))
    before = psutil.Process().memory_info().rss
    assert len(await asyncio.to_thread(bad.encode_text, "ꙮ" * 2)) > 2000, "a short text is bearable"
    with pytest.raises(ModelError, match=r"tokenizer of bad .*memory.* with a text of 60000 characters"):
        await asyncio.to_thread(bad.encode_text, "ꙮ" * 60_000)
    await until(lambda: not far.pids)
    with pytest.raises(ModelError, match="tokenizer of bad"):
        await asyncio.to_thread(bad.encode_text, "ꙮ" * 60_000)
    assert not far.pids, "it is refused without a process for a minute"
    assert psutil.Process().memory_info().rss < before + (32 << 20)
    assert await asyncio.to_thread(good.encode_text, "Hello")
    now[0] += KEPT_S + 1
    assert await asyncio.to_thread(bad.encode_text, "ꙮ" * 8)


async def test_a_slow_tokenizer_is_stopped_and_leaves_other_models_a_process(
    far: FarTokenizers, tmp_path: Path
) -> None:
    bad = far.attached(TextModel.open(slow(tmp_path / "bad")), tmp_path / "bad", 1)
    good = unlisted(far.attached(TextModel.open(write_text_model(tmp_path / "good")), tmp_path / "good", 1))
    asked = [asyncio.create_task(asyncio.to_thread(bad.encode_text, "a" * 600)) for _ in range(3)]
    await until(lambda: bool(far.pids))
    assert await asyncio.to_thread(good.encode_text, "Hello")
    for task in asked:
        with pytest.raises(ModelError, match="tokenizer of bad runs too long"):
            await task
    assert len(far.pids) <= NUM_PROCESSES


async def test_a_text_of_a_million_characters_may_be_at_fault_itself(far: FarTokenizers, tmp_path: Path) -> None:
    text = far.attached(TextModel.open(growing(tmp_path / "m")), tmp_path / "m", 1)
    with pytest.raises(InputError, match="shorten the text"):
        await asyncio.to_thread(text.encode_text, "ꙮ" * (LONG_TEXT + 1))
    assert await asyncio.to_thread(text.encode_text, "Hello"), "it is not refused afterwards"


async def test_the_event_loop_never_waits_for_a_process(far: FarTokenizers, tmp_path: Path) -> None:
    text = far.attached(TextModel.open(slow(tmp_path)), tmp_path, 1)
    with pytest.raises(InputError, match="cannot be used here"):
        text.encode_text("Hello")


async def test_a_node_that_stops_ends_the_threads_that_wait(tmp_path: Path) -> None:
    far = FarTokenizers(9.0)
    text = far.attached(TextModel.open(slow(tmp_path)), tmp_path, 1)
    waiting = asyncio.create_task(asyncio.to_thread(text.encode_text, "a" * 900))
    await until(lambda: bool(far.pids))
    await far.close()
    with pytest.raises(NotReadyError, match="stopping"):
        await waiting
    assert not far.pids


@pytest.mark.extended
async def test_a_request_with_a_growing_tokenizer_gets_one_clear_error(tmp_path: Path) -> None:
    async with served(ScriptedMesh(growing(tmp_path)), ApiOptions()) as api:
        body = {"model": api.mesh.names[0], "prompt": "ꙮ" * 60_000, "max_tokens": 1}
        async with api.http.post("/v1/completions", json=body) as reply:
            assert reply.status == 400
            error = (await reply.json())["error"]
        assert error["code"] == "model_unusable" and "memory" in error["message"]
        async with api.http.post("/v1/completions", json={**body, "prompt": "Hello"}) as reply:
            assert reply.status == 200, "a text that cannot grow is answered"

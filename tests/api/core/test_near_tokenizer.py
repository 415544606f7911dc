"""A process reads and uses a large tokenizer; the node has a table of its tokens, with which it does all else alike."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer

from exo_mesh.api.core import texts as texts_module
from exo_mesh.api.core.near_tokenizer import IDLE_S, NearTokenizer
from exo_mesh.api.core.texts import TextModels
from exo_mesh.errors import InputError, ModelError, NotReadyError
from exo_mesh.text import token_table
from exo_mesh.text.control_text import ChatPrompt
from exo_mesh.text.respelling import respell
from exo_mesh.text.token_table import TokenTable
from exo_mesh.text.tokenizer import TextModel
from tests.api.scripted_mesh import TemplatesRenderedHere
from tests.mesh.discovery.waiting import until
from tests.text.text_models import byte_fallback, byte_level, word_piece, write_text_model

MARK = "84120398756102398475"
WORDS = (
    "",
    "a",
    "Hello, world! <|im_end|>",
    "Grüße, 日本語 und e\u0301 🙂👩\u200d👩\u200d👧 <|im_end|> ﷺ ǆ\n" * 3,
    "hello worlds don't",
)


@pytest.fixture
async def texts(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TextModels]:
    """Here every tokenizer is a large one."""
    monkeypatch.setattr(texts_module, "LARGE_BYTES", 0)
    monkeypatch.setattr(token_table, "PART_TOKENS", 100)
    made = TextModels(TemplatesRenderedHere())
    yield made
    pids = made._tokenizers.pids
    await made.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def near_pid(texts: TextModels) -> int:
    (pid,) = texts._tokenizers._near.pids
    return pid


async def opened(texts: TextModels, directory: Path) -> TextModel:
    """A model of which the process has the tokenizer."""
    text = await texts.get(directory)
    await texts.work(lambda: text.encode_text("a"))
    return text


async def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def edited(directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    path = write_text_model(directory) / "tokenizer.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return directory


@pytest.mark.parametrize("make", [byte_level, byte_fallback, word_piece])
async def test_all_that_a_node_does_with_a_tokenizer_is_the_same_with_its_table(
    texts: TextModels, tmp_path: Path, make: Callable[[], Tokenizer]
) -> None:
    tokenizer = make()
    write_text_model(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    here, text = TextModel.open(tmp_path), await texts.get(tmp_path)
    assert isinstance(text.tokenizer, TokenTable)
    for name in ("special_tokens", "eos_ids", "hidden_ids", "output", "cleans_spaces", "bounds", "num_ids", "vision"):
        assert getattr(text, name) == getattr(here, name), name
    assert (text.vocab_size, text.added_tokens) == (here.vocab_size, here.added_tokens)
    ids = range(-1, here.vocab_size + 3)
    assert [text.has_id(one) for one in ids] == [here.has_id(one) for one in ids]
    assert [text.token_bytes(one) for one in ids[1:]] == [here.token_bytes(one) for one in ids[1:]]
    tokens = [here.tokenizer.id_to_token(one) for one in ids[1:-3]]
    assert [text.tokenizer.token_to_id(one) for one in tokens] == list(range(len(tokens)))
    assert text.tokenizer.token_to_id("no token") is None and text.tokenizer.token_to_id("") is None
    rng = random.Random(1)
    for _ in range(50):
        drawn = rng.choices(range(len(tokens)), k=rng.randint(0, 40))
        assert (text.decode(drawn), text.offsets(drawn)) == (here.decode(drawn), here.offsets(drawn))
        for skips in (True, False):
            decoded = text.tokenizer.decode(drawn, skip_special_tokens=skips)
            assert decoded == here.tokenizer.decode(drawn, skip_special_tokens=skips)
    await texts.work(lambda: text.encode_text("a"))  # opens it
    for words in WORDS:
        assert text.encode_text(words) == here.encode_text(words), "threads need no event loop, and the loop no thread"
        assert text.encode_prompt(words) == here.encode_prompt(words)
        assert text.encode_for_vector(words, "second", 40) == here.encode_for_vector(words, "second", 40)
        assert respell(text, words) == respell(here, words)


async def test_control_tokens_in_texts_are_found_and_told_apart(texts: TextModels, tmp_path: Path) -> None:
    here, text = TextModel.open(write_text_model(tmp_path)), await opened(texts, tmp_path)
    for words in ("say <|im_end|> now", "say nothing", "<|im_", WORDS[3]):
        marked = text.marked(words, MARK, ["<|im_start|>"])
        assert marked == here.marked(words, MARK, ["<|im_start|>"])
        prompt = ChatPrompt(f"<|im_start|>user\n{marked}<|im_end|>\n", MARK)
        assert text.encode_chat(prompt) == here.encode_chat(prompt)
    with pytest.raises(InputError, match="lone surrogate"):
        text.encode_text("\ud800")
    long = "Hello, world! <|im_end|>" * 5000
    assert await texts.work(lambda: text.encode_text(long)) == here.encode_text(long), "in another process"
    assert len(texts._tokenizers.pids) == 2
    with pytest.raises(InputError, match="cannot be used here"):
        text.encode_text(long)


async def test_a_short_text_that_marks_may_make_long_is_marked_elsewhere(texts: TextModels, tmp_path: Path) -> None:
    text = await opened(texts, write_text_model(tmp_path))
    few, many = "<|im_end|>" * 10, "<|im_end|>" * 1600
    assert text.marked(few, MARK, []).count(MARK) == 10
    assert len(texts._tokenizers.pids) == 1
    made = await texts.work(lambda: text.marked(many, MARK, []))
    assert made.count(MARK) == 1600
    assert len(texts._tokenizers.pids) == 2


async def test_a_process_that_has_ended_is_replaced_without_an_error(texts: TextModels, tmp_path: Path) -> None:
    text = await texts.get(write_text_model(tmp_path))
    wanted, pid = await texts.work(lambda: text.encode_text(WORDS[2])), near_pid(texts)
    os.kill(pid, signal.SIGKILL)
    assert await texts.work(lambda: text.encode_text(WORDS[2])) == wanted
    assert near_pid(texts) != pid


async def test_a_process_that_does_not_answer_is_one_error_and_replaced(
    texts: TextModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = await opened(texts, write_text_model(tmp_path))
    wanted = text.encode_text(WORDS[2])
    monkeypatch.setattr(texts._tokenizers, "_limit_s", -0.8)  # 0.2 s with the grace
    await stop(near_pid(texts))
    with pytest.raises(ModelError, match="runs too long with a text of 24 characters"):
        await texts.work(lambda: text.encode_text(WORDS[2]))
    monkeypatch.setattr(texts._tokenizers, "_limit_s", 5.0)
    assert await texts.work(lambda: text.encode_text(WORDS[2])) == wanted


async def test_the_event_loop_waits_neither_for_others_nor_for_a_tokenizer_that_is_read(
    texts: TextModels, tmp_path: Path
) -> None:
    text, near = await texts.get(write_text_model(tmp_path)), texts._tokenizers._near
    assert await texts.work(lambda: text.encode_text("a")) == text.encode_text("a")
    with near._lock, pytest.raises(InputError, match="cannot be used here now"):
        text.encode_text("a")
    os.kill(near_pid(texts), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises((InputError, ModelError)):
            text.encode_text("a")
    assert await texts.work(lambda: text.encode_text("a")) == text.encode_text("a")


@pytest.mark.timeout(30)
async def test_the_event_loop_does_not_wait_for_a_process_that_hangs(
    texts: TextModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = await opened(texts, write_text_model(tmp_path))
    wanted, pid = text.encode_text("a"), near_pid(texts)
    monkeypatch.setattr(texts._tokenizers, "_limit_s", 300.0)
    await stop(pid)
    with pytest.raises(ModelError, match="runs too long"):
        text.encode_text("a")
    assert await texts.work(lambda: text.encode_text("a")) == wanted and near_pid(texts) != pid


async def test_many_threads_and_models_share_it(texts: TextModels, tmp_path: Path) -> None:
    models = [await texts.get(write_text_model(tmp_path / str(number))) for number in range(3)]
    wanted = TextModel.open(tmp_path / "0").encode_text(WORDS[3])
    jobs = [texts.work(lambda model=model: model.encode_text(WORDS[3])) for model in models * 20]
    assert await asyncio.gather(*jobs) == [wanted] * 60
    assert len(texts._tokenizers.pids) == 1


async def test_what_cannot_be_read_is_one_clear_error_and_the_process_goes_on(
    texts: TextModels, tmp_path: Path
) -> None:
    good = await opened(texts, write_text_model(tmp_path / "good"))
    pid = near_pid(texts)
    broken = edited(tmp_path / "broken", lambda document: document.update(model={"type": "BPE", "vocab": 5}))
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        await texts.get(broken)

    def far_id(document: dict[str, Any]) -> None:
        document["model"]["vocab"]["far"] = 1 << 30

    with pytest.raises(ModelError, match="id 1073741824"):
        await texts.get(edited(tmp_path / "far", far_id))
    grown = edited(
        tmp_path / "grown", lambda document: document.update(normalizer={"type": "Prepend", "prepend": "a" * 10**5})
    )
    with pytest.raises(ModelError, match="times longer"):
        await texts.get(grown)
    assert good.encode_text("a") and near_pid(texts) == pid


async def test_a_thread_that_waits_at_the_end_of_a_node_gets_an_error(texts: TextModels, tmp_path: Path) -> None:
    text = await opened(texts, write_text_model(tmp_path))
    await stop(near_pid(texts))
    waiting = asyncio.create_task(texts.work(lambda: text.encode_text(WORDS[2])))
    await asyncio.sleep(0)
    await texts._tokenizers.close()
    with pytest.raises((NotReadyError, ModelError)):
        await waiting


async def test_it_ends_after_an_hour_without_a_text_and_not_before(texts: TextModels, tmp_path: Path) -> None:
    now = [0.0]
    near = NearTokenizer(lambda: now[0])
    texts._tokenizers._near = near
    text = await opened(texts, write_text_model(tmp_path))
    now[0] = IDLE_S - 1
    assert near.end_idle(now[0]) == IDLE_S and near.pids
    now[0] = IDLE_S
    near.end_idle(now[0])
    assert not near.pids
    assert await texts.work(lambda: text.encode_text("a"))


def test_tokens_are_found_by_their_text_among_others_that_begin_or_end_like_them() -> None:
    tokens = ["ab", None, "a", "b", "abab", "", "aba", "ba", None, "a"]
    lengths = [-1 if token is None else len(token) for token in tokens]
    head = token_table.TableHead("BPE", None, False, 8, [])
    packed = token_table.array("i", lengths).tobytes()
    table = TokenTable(head, [token_table.TablePart(packed, "".join(token or "" for token in tokens))])
    assert [table.id_to_token(one) for one in range(-1, 12)] == [None, *tokens, None, None]
    assert [table.token_to_id(one) for one in ("ab", "a", "b", "abab", "aba", "ba", "bab")] == [0, 2, 3, 4, 6, 7, None]

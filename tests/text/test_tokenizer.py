"""A model's text files: what is read from them, and what is said when they cannot be used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from exo_mesh.errors import ContextLengthError, InputError, ModelError
from exo_mesh.text.control_text import ChatPrompt
from exo_mesh.text.tokenizer import TextModel
from tests.text.text_models import byte_fallback, byte_level, encode_chat, write_text_model

SHIPPED = Path(__file__).parents[2] / "exo_mesh" / "weights" / "shipped" / "exo-mesh-demo"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_text_model(tmp_path / "model")


def test_special_tokens_and_ends_come_from_both_configs(directory: Path) -> None:
    text = TextModel.open(directory)
    assert text.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    ids = {name: text.tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>", "<|im_start|>")}
    assert text.eos_ids == {ids["<|im_end|>"], ids["<|endoftext|>"]}
    assert text.hidden_ids == set(ids.values())


def test_defaults_are_the_models_own(tmp_path: Path) -> None:
    text = TextModel.open(write_text_model(tmp_path, temperature=0.7, top_k=20, top_p=1, do_sample=True))
    assert (text.defaults.temperature, text.defaults.top_k, text.defaults.top_p) == (0.7, 20, 1.0)
    assert TextModel.open(write_text_model(tmp_path, temperature=0.7, do_sample=False)).defaults.temperature == 0
    assert TextModel.open(write_text_model(tmp_path)).defaults.temperature is None


def test_a_chat_is_encoded_with_its_control_tokens(directory: Path) -> None:
    text = TextModel.open(directory)
    ids = encode_chat(text, [{"role": "user", "content": "Hello"}], add_generation_prompt=False)
    assert ids[0] == text.tokenizer.token_to_id("<|im_start|>")
    assert text.tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHello<|im_end|>\n"


def test_nothing_is_cut_or_padded_whatever_the_file_says(directory: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(directory / "tokenizer.json"))
    assert len(TextModel.open(directory).encode_text("a b c d e f g")) > 3
    assert len(TextModel.open(directory).encode_text("a")) == 1


@pytest.mark.parametrize("content", ["grüße € 🙂 日本語", "plain"])
def test_the_bytes_of_tokens_join_to_the_text(directory: Path, content: str) -> None:
    text = TextModel.open(directory)
    assert b"".join(map(text.token_bytes, text.encode_text(content))).decode() == content
    assert text.token_bytes(99_999) == b""
    assert text.token_bytes(min(text.hidden_ids)).startswith(b"<|")


def test_the_bytes_of_pieces_and_byte_tokens(tmp_path: Path) -> None:
    byte_fallback().save(str(write_text_model(tmp_path) / "tokenizer.json"))
    text = TextModel.open(tmp_path)
    assert b"".join(map(text.token_bytes, text.encode_text("wor€"))).decode() == " wor€"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "this file is missing"),
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", "{", "cut short"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
        ("generation_config.json", '{"temperature": "hot"}', "temperature"),
        ("generation_config.json", '{"top_k": 1.5}', "top_k"),
        ("generation_config.json", '{"top_p": 2}', "top_p"),
    ],
)
def test_files_that_cannot_be_used_are_named(directory: Path, name: str, content: str | None, message: str) -> None:
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(content)
    with pytest.raises(ModelError, match=rf"{name}.*{message}"):
        TextModel.open(directory)


def test_the_shipped_model_can_be_opened() -> None:
    text = TextModel.open(SHIPPED)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    assert text.tokenizer.decode(encode_chat(text, messages), skip_special_tokens=False).endswith("assistant\n")
    assert text.eos_ids


def test_a_text_that_cannot_fit_is_refused_without_the_memory_to_encode_it(directory: Path) -> None:
    text = TextModel.open(directory)
    this = psutil.Process()
    before = this.memory_info().rss
    huge = "Hello, world! " * 1_200_000
    with pytest.raises(ContextLengthError, match=f"{len(huge)} characters and more than 4096 tokens") as caught:
        text.check_length(huge, 4096, "prompt")
    assert caught.value.param == "prompt"
    assert this.memory_info().rss - before - len(huge) < 64 * 2**20


def test_a_long_text_that_may_fit_is_not_refused_by_its_slices(directory: Path) -> None:
    text = TextModel.open(directory)
    long = "Hello, world! How are you today? " * 6_000
    text.check_length(long, len(text.encode_text(long)), "prompt")


def panicking(directory: Path, **parts: Any) -> Path:
    """A model whose tokenizer.json has `parts` that the tokenizers library, which is in Rust, panics at."""
    path = write_text_model(directory) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))
    return directory


EMPTY_PATTERN = {"type": "Replace", "pattern": {"String": ""}, "content": "xx"}
EMPTY_MAP = {"type": "Precompiled", "precompiled_charsmap": ""}
STRIPS_TWICE = {"type": "Strip", "content": "H", "start": 1, "stop": 1}


def test_a_tokenizer_that_panics_is_an_error_like_any_other(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        TextModel.open(panicking(tmp_path, normalizer=EMPTY_MAP))
    text = TextModel.open(panicking(tmp_path, normalizer=EMPTY_PATTERN))
    for encode in (text.encode_text, text.encode_prompt):
        with pytest.raises(InputError, match="cannot encode this text"):
            encode("Hello")
    text = TextModel.open(panicking(tmp_path, decoder=STRIPS_TWICE))
    with pytest.raises(ModelError, match="cannot decode"):
        text.detokenizer().push(text.encode_text("H")[0])


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_what_ends_a_program_or_a_task_is_no_panic(directory: Path, stop: type[BaseException]) -> None:
    class Stopped:
        def encode(self, *_: Any, **__: Any) -> None:
            raise stop

        decode = encode

        def id_to_token(self, _: int) -> str:
            return "a"

    text = replace(TextModel.open(directory), tokenizer=cast(Tokenizer, Stopped()))
    with pytest.raises(stop):
        text.encode_text("Hello")
    with pytest.raises(stop):
        text.detokenizer().push(70)


def test_a_token_that_the_model_does_not_have_is_named_before_the_model_is_asked(tmp_path: Path) -> None:
    write_text_model(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 400}')
    path = tmp_path / "tokenizer.json"
    document = json.loads(path.read_text())
    flags = {**document["added_tokens"][0], "special": False}
    beyond = [{**flags, "id": 333 + number, "content": f"§{number}§"} for number in range(100)]
    path.write_text(json.dumps({**document, "added_tokens": document["added_tokens"] + beyond}))
    text = TextModel.open(tmp_path)
    assert text.encode_text("§66§") == [399] and text.has_id(399)
    assert text.tokenizer.id_to_token(400) == "§67§" and not text.has_id(400)
    calls: list[Callable[[], object]] = [
        lambda: text.encode_text("a §67§"),
        lambda: text.encode_prompt("§67§"),
        lambda: text.encode_chat(ChatPrompt("§67§0", "0")),
        lambda: text.encode_for_vector("§67§"),
    ]
    for call in calls:
        with pytest.raises(ModelError, match=r'token "§67§" with the id 400 .*only 400 token ids'):
            call()

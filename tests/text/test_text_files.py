"""Facts about a model's text are found in each file where transformers looks for them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from exo_mesh.errors import ModelError
from exo_mesh.text.text_files import SamplingDefaults, TextFiles, check_text_files
from exo_mesh.text.tokenizer import TextModel, tokenizer_text
from tests.support.checkpoints import write_json
from tests.text.text_models import byte_level, word_piece

FILES = {"config": "config.json", "generation": "generation_config.json", "settings": "tokenizer_config.json"} | {
    "named": "special_tokens_map.json",
    "added": "added_tokens.json",
}
VOCAB = 256


def write_model(directory: Path, tokenizer: Tokenizer | None = None, **files: Any) -> Path:
    """A model with a byte-level tokenizer of 256 tokens, then <s> and </s>; files by the names of FILES."""
    directory.mkdir(exist_ok=True)
    if tokenizer is None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, value in {"config": {"model_type": "llama", "vocab_size": 300}, **files}.items():
        write_json(directory / FILES[name], value)
    return directory


BOS, EOS, NEXT = VOCAB, VOCAB + 1, VOCAB + 2


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation": {"eos_token_id": EOS}}, {EOS}),
        ({"generation": {"eos_token_id": [EOS, 5, -1]}}, {EOS, 5}),
        ({"generation": {"eos_token_id": None}, "config": {"eos_token_id": EOS}}, {EOS}),
        ({"config": {"eos_token_id": [EOS, 7]}}, {EOS, 7}),
        ({"config": {"text_config": {"eos_token_id": EOS}}}, {EOS}),
        ({"config": {"llm_config": {"eos_token_id": EOS}}}, {EOS}),
        ({"settings": {"eos_token": "</s>"}}, {EOS}),
        ({"settings": {"eos_token": {"content": "</s>", "special": True}}}, {EOS}),
        ({"named": {"eos_token": {"content": "</s>"}}}, {EOS}),
        ({"settings": {"eos_token": "<s>"}, "named": {"eos_token": "</s>"}}, {EOS}),
        ({"settings": {"eos_token": "<s>", "added_tokens_decoder": {}}, "named": {"eos_token": "</s>"}}, {BOS}),
        ({"generation": {"eos_token_id": 5}, "settings": {"eos_token": "</s>"}}, {5, EOS}),
        ({"generation": {"eos_token_id": -1}}, set()),
        ({}, set()),
    ],
)
def test_the_tokens_that_end_an_answer(tmp_path: Path, files: dict[str, Any], ids: set[int]) -> None:
    assert TextModel.open(write_model(tmp_path, **files)).eos_ids == ids


def test_templates_get_tokens_that_only_a_config_names(tmp_path: Path) -> None:
    config = {"bos_token_id": BOS, "eos_token_id": [EOS, 5]}
    assert TextModel.open(write_model(tmp_path, config=config)).special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    none = write_model(tmp_path, config=config, settings={"bos_token": None})
    assert TextModel.open(none).special_tokens == {"eos_token": "</s>"}, "null says that there is none"


@pytest.mark.parametrize(
    ("files", "is_special"),
    [
        ({"added": {"<x>": NEXT}}, False),
        ({"added": {"<x>": NEXT}, "named": {"pad_token": "<x>"}}, True),
        ({"settings": {"added_tokens_decoder": {str(NEXT): {"content": "<x>", "special": True}}}}, True),
        ({"settings": {"added_tokens_decoder": {str(NEXT): {"content": "<x>", "special": False}}}}, False),
        ({"settings": {"eos_token": "<x>"}}, True),
        ({"settings": {"extra_special_tokens": ["<x>"]}}, True),
        ({"settings": {"extra_special_tokens": {"image_token": "<x>"}}}, True),
        ({"settings": {"additional_special_tokens": [{"content": "<x>"}]}}, True),
        ({"named": {"unk_token": "<x>"}}, True),
    ],
)
def test_tokens_that_only_other_files_add(tmp_path: Path, files: dict[str, Any], is_special: bool) -> None:
    text = TextModel.open(write_model(tmp_path, **files))
    ids = text.encode_text("a<x>b")
    assert ids[1] == NEXT and text.decode(ids) == ("ab" if is_special else "a<x>b")
    if "extra_special_tokens" in files.get("settings", {}):
        assert text.special_tokens.get("image_token") in (None, "<x>")
    assert Tokenizer.from_str(tokenizer_text(tmp_path)).token_to_id("<x>") == NEXT, "grammars get the same tokens"


def test_an_added_token_has_the_id_that_its_file_gives(tmp_path: Path) -> None:
    table = {"270": {"content": "<x>", "special": True}}
    text = TextModel.open(write_model(tmp_path, settings={"added_tokens_decoder": table}))
    assert text.encode_text("<x>") == [270]


@pytest.mark.parametrize("config", [{"vocab_size": 2**31 - 1}, {}])
@pytest.mark.parametrize(
    "files",
    [
        {"settings": {"added_tokens_decoder": {"900000": {"content": "<x>", "special": True}}}},
        {"added": {"<x>": 20_000}},
        {"added": {f"<{i}>": 400 + 2000 * i for i in range(9)}},
    ],
)
def test_a_model_that_leaves_many_ids_without_a_token_is_refused(
    tmp_path: Path, files: dict[str, Any], config: dict[str, Any]
) -> None:
    write_model(tmp_path, config=config, **files)
    for read in (check_text_files, TextModel.open):
        with pytest.raises(
            ModelError, match=r"tokenizer\.json: .*no file has a token for [0-9]+ of the ids from 258 on"
        ):
            read(tmp_path)


@pytest.mark.parametrize("number", [2**20, 2**31 - 2])
def test_no_token_is_added_beyond_a_million_whatever_the_config_says(tmp_path: Path, number: int) -> None:
    write_model(tmp_path, config={"vocab_size": 2**31 - 1}, added={"<x>": number})
    check_text_files(tmp_path)
    assert TextModel.open(tmp_path).tokenizer.token_to_id("<x>") is None


def test_a_token_without_a_row_in_the_model_is_not_added(tmp_path: Path) -> None:
    files = {"config": {"vocab_size": VOCAB + 2}, "settings": {"eos_token": "<x>"}}
    assert max(TextModel.open(write_model(tmp_path, **files)).encode_text("<x>")) < VOCAB


def test_the_newer_file_says_whether_a_token_is_text(tmp_path: Path) -> None:
    table = {str(EOS): {"content": "</s>", "special": False, "normalized": False}}
    text = TextModel.open(write_model(tmp_path, settings={"added_tokens_decoder": table}))
    assert text.decode([EOS]) == "</s>"


def test_a_file_that_adds_nothing_leaves_the_tokenizer_as_it_is(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokens = tokenizer.get_added_tokens_decoder()
    names = ("content", "special", "lstrip", "rstrip", "single_word", "normalized")
    table = {str(i): {name: getattr(token, name) for name in names} for i, token in tokens.items()}
    write_model(tmp_path, tokenizer, settings={"added_tokens_decoder": table, "eos_token": "<|im_end|>"})
    assert tokenizer_text(tmp_path) == (tmp_path / "tokenizer.json").read_text("utf-8")


@pytest.mark.parametrize(
    ("kind", "value", "spaced"),
    [
        ("GPT2TokenizerFast", True, True),
        ("Qwen2Tokenizer", True, True),
        ("PreTrainedTokenizerFast", True, False),
        ("LlamaTokenizerFast", True, False),
        ("GPT2TokenizerFast", None, False),
        ("GPT2TokenizerFast", False, False),
    ],
)
def test_a_space_before_a_text_is_added_for_classes_that_have_the_setting(
    tmp_path: Path, kind: str, value: object, spaced: bool
) -> None:
    settings = {"tokenizer_class": kind, "add_prefix_space": value}
    text = TextModel.open(write_model(tmp_path, settings=settings))
    assert text.decode(text.encode_text("ab")) == (" ab" if spaced else "ab")


@pytest.mark.parametrize("cleans", [True, False])
def test_spaces_before_punctuation_are_left_out_where_the_settings_say_so(tmp_path: Path, cleans: bool) -> None:
    tokenizer = word_piece()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    text = TextModel.open(write_model(tmp_path, tokenizer, settings={"clean_up_tokenization_spaces": cleans}))
    ids = text.encode_text("hello , worlds ! do n't , hello")
    wanted = "hello, world ##s! don't, hello" if cleans else "hello , worlds ! do n ' t , hello"
    assert text.decode(ids) == wanted.replace(" ##", "")
    pieces = text.detokenizer()
    streamed = [pieces.push(token_id) for token_id in ids]
    assert "".join(streamed) + pieces.flush() == text.decode(ids)
    assert streamed[3], "a text is not held until its end"


def test_byte_level_text_keeps_its_spaces_whatever_the_settings_say(tmp_path: Path) -> None:
    text = TextModel.open(write_model(tmp_path, settings={"clean_up_tokenization_spaces": True}))
    assert text.decode(text.encode_text("a , b .")) == "a , b ."


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        ({"top_k": -1, "top_p": -1, "min_p": -1, "temperature": -1, "repetition_penalty": -1}, SamplingDefaults()),
        ({"top_k": 0, "min_p": 0, "repetition_penalty": 0}, SamplingDefaults()),
        ({"temperature": 0, "top_p": 0}, SamplingDefaults(temperature=0.0, top_p=0.0)),
        ({"top_k": 50.0, "top_p": 1}, SamplingDefaults(top_k=50, top_p=1.0)),
        ({"top_k": None, "temperature": 0.6, "do_sample": False}, SamplingDefaults(temperature=0.0)),
    ],
)
def test_values_that_turn_off_leave_the_usual_ones(
    tmp_path: Path, generation: dict[str, Any], defaults: SamplingDefaults
) -> None:
    assert TextFiles.read(write_model(tmp_path, generation=generation)).defaults == defaults


CASES: list[dict[str, Any]] = [
    {"settings": {"bos_token": "<s>", "eos_token": "</s>"}},
    {"settings": {"eos_token": "<s>"}, "named": {"eos_token": "</s>", "bos_token": {"content": "<s>"}}},
    {"named": {"eos_token": "</s>"}},
    {"added": {"<x>": NEXT}},
    {"settings": {"added_tokens_decoder": {str(NEXT): {"content": "<x>", "special": True}}}},
    {"settings": {"added_tokens_decoder": {str(NEXT): {"content": "<x>", "special": False}}}},
    {"settings": {"eos_token": "<x>"}},
    {"settings": {"extra_special_tokens": ["<x>"]}},
    {"settings": {"extra_special_tokens": {"image_token": "<x>"}}},
    {"settings": {"additional_special_tokens": ["<x>"]}},
    {"settings": {"bos_token": "<s>", "add_bos_token": True}},
    {"settings": {"add_prefix_space": True}},
    {"settings": {"clean_up_tokenization_spaces": True}},
]


@pytest.mark.extended
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("files", CASES, ids=json.dumps)
def test_tokens_and_text_are_those_of_transformers(tmp_path: Path, files: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **files.get("settings", {})}
    write_model(tmp_path, **{**files, "settings": settings})
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), TextModel.open(tmp_path)
    for sentence in ("a . b<x> c", "<s>it 's</s>", " x "):
        ids = theirs(sentence)["input_ids"]
        assert ours.encode_text(sentence) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.eos_ids == ({theirs.eos_token_id} - {None})

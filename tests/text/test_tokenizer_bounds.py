"""A tokenizer.json that may make a text much longer, or take long, is refused or kept out of the node's process."""

from __future__ import annotations

import json
import sys
import unicodedata
from base64 import b64encode
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

from exo_mesh.errors import ModelError
from exo_mesh.text import tokenizer_bounds
from exo_mesh.text.text_files import TextFiles, check_text_files, read_bounds
from exo_mesh.text.tokenizer import TextModel, tokenizer_text
from exo_mesh.text.tokenizer_bounds import NODE_LENGTH, TokenizerBounds
from exo_mesh.weights.splitting_patterns import KNOWN, LLAMA3
from tests.text.text_models import byte_fallback, byte_level, word_piece, write_text_model


def changed(directory: Path, **parts: Any) -> Path:
    """A model whose tokenizer.json has these parts instead; a part may be made of the old one."""
    path = write_text_model(directory) / "tokenizer.json"
    document = json.loads(path.read_text())
    parts = {"pre_tokenizer": None, **parts} if "normalizer" in parts else parts
    parts = {name: part(document[name]) if callable(part) else part for name, part in parts.items()}
    path.write_text(json.dumps({**document, **parts}))
    return directory


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def row(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: [*steps]}


def charsmap(*texts: str) -> str:
    return b64encode(b"\4\0\0\0" + b"\0" * 4 + b"".join(text.encode() + b"\0" for text in texts)).decode()


def template(*pieces: dict[str, Any], ids: int = 1) -> dict[str, Any]:
    special = {"id": "x", "ids": [0] * ids, "tokens": ["x"] * ids}
    return {"type": "TemplateProcessing", "single": [*pieces], "pair": [], "special_tokens": {"x": special}}


SHIPPED = Path(str(resources.files("exo_mesh.weights") / "shipped" / "exo-mesh-demo"))
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
SPECIAL = {"SpecialToken": {"id": "x", "type_id": 0}}
TEN = replace("ꙮ", "ꙮ" * 10)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def token(content: str, number: int = 400, **flags: bool) -> dict[str, Any]:
    base = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": content, **base, **flags}


GROWING: dict[str, tuple[dict[str, Any], str]] = {
    "nine steps": ({"normalizer": row("normalizers", *[TEN] * 9)}, "1000000000 times longer"),
    "nested": (
        {"normalizer": row("normalizers", row("normalizers", *[TEN] * 3), row("normalizers", *[TEN] * 3))},
        "1000000 times longer",
    ),
    "under the name of another part": (
        {"normalizer": {**row("pretokenizers"), "normalizers": [TEN] * 9}},
        "1000000000 times longer",
    ),
    "one long content": ({"normalizer": replace("ꙮ", "x" * 10_001)}, "10001 times longer"),
    "an empty pattern": ({"normalizer": replace("", "x" * 10_000)}, "10001 times longer"),
    "an expression": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "ꙮ*"}, "content": "x" * 10_000}},
        "10001 times longer",
    ),
    "a prefix": ({"normalizer": {"type": "Prepend", "prepend": "x" * 10_000}}, "10001 times longer"),
    "forms of Unicode": ({"normalizer": row("normalizers", *[{"type": "NFKD"}] * 4)}, "104976 times longer"),
    "a table": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("a", "ﷺ" * 10_001)}},
        "10001 times longer",
    ),
    "bytes of bytes": ({"pre_tokenizer": row("pretokenizers", *[BYTES] * 8)}, "times longer"),
    "both parts": (
        {"normalizer": row("normalizers", *[TEN] * 3), "pre_tokenizer": row("pretokenizers", *[BYTES] * 2)},
        "25000 times longer",
    ),
    "a decoder": ({"decoder": row("decoders", *[replace(" ", " " * 10)] * 9)}, "decoder can make a text 1000000000"),
    "a decoder with an empty suffix": (
        {"decoder": row("decoders", *[{"type": "BPEDecoder", "suffix": ""}] * 5)},
        "decoder can make a text 32",
    ),
    "a decoder with an empty delimiter": (
        {
            "decoder": row(
                "decoders", *[{"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": False}] * 3
            )
        },
        "decoder can make a text 64",
    ),
    "a slow decoder": (
        {"decoder": {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": ""}},
        "time has no bound",
    ),
    "tokens around": ({"post_processor": template(*[SPECIAL] * 2, TEXT, ids=600)}, "puts 1200 tokens around"),
    "many pieces": ({"post_processor": template(*[SPECIAL] * 1001, TEXT)}, "puts 1001 tokens around"),
    "many copies": ({"post_processor": template(TEXT, TEXT, TEXT)}, "writes the text 3 times"),
    "copies of copies": (
        {"post_processor": row("processors", *[template(TEXT, TEXT)] * 2)},
        "writes the text 4 times",
    ),
    "long added tokens together": (
        {"added_tokens": lambda old: [*old, *(token(f"{number:04}" + "x" * 500) for number in range(5000))]},
        "characters; at most 2097152",
    ),
    "a long added token": ({"added_tokens": lambda old: [*old, token("x" * 1025)]}, "has 1025 characters"),
    "added tokens that grow": (
        {
            "normalizer": replace("ꙮ", "x" * 9000),
            "added_tokens": lambda old: [*old, token("ꙮ" * 300, normalized=True)],
        },
        "added tokens 2700000 characters long",
    ),
    "a long token": ({"model": lambda old: {**old, "vocab": {**old["vocab"], 'x"' * 9000: 400}}}, "more than 4096"),
    "a long prefix of subwords": (
        {"model": lambda old: {**old, "continuing_subword_prefix": "x" * 257}},
        "continuing_subword_prefix of 257",
    ),
    "an unknown kind": ({"normalizer": {"type": "Magic"}}, "'Magic', which is not supported"),
    "no kind": ({"decoder": {"content": "x"}}, "'None', which is not supported"),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_tokenizer_beyond_the_bounds_is_refused_before_a_library_reads_it(tmp_path: Path, name: str) -> None:
    parts, words = GROWING[name]
    directory = changed(tmp_path, **parts)
    for read in (check_text_files, TextModel.open, tokenizer_text):
        with pytest.raises(ModelError, match=rf"tokenizer\.json.*{words}"):
            cast(Callable[[Path], Any], read)(directory)


def test_added_tokens_are_counted_over_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_bounds, "MAX_ADDED", 5)
    directory = write_text_model(tmp_path)
    check_text_files(directory)
    settings = directory / "tokenizer_config.json"
    table = {str(400 + i): {"content": f"<{i}>", "special": True} for i in range(3)}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "added_tokens_decoder": table}))
    with pytest.raises(ModelError, match="8 added tokens; at most 5"):
        check_text_files(directory)


def bounds(directory: Path, **parts: Any) -> TokenizerBounds:
    path = changed(directory, **parts) / "tokenizer.json"
    return read_bounds(path, path.read_bytes(), TextFiles.read(directory))


@pytest.mark.parametrize("make", [byte_level, byte_fallback, word_piece])
def test_the_three_families_are_used_in_the_node(tmp_path: Path, make: Callable[[], Tokenizer]) -> None:
    path = write_text_model(tmp_path) / "tokenizer.json"
    make().save(str(path))
    found = read_bounds(path, path.read_bytes(), TextFiles.read(tmp_path))
    assert found.is_light("Hello, world! " * 500) and found.is_light("grüße €uro 日本語 🙂" * 50)
    assert not found.is_light("a" * (NODE_LENGTH + 1))


def test_an_expression_whose_time_is_unknown_keeps_a_tokenizer_out_of_the_node(tmp_path: Path) -> None:
    def split(pattern: str) -> dict[str, Any]:
        return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}

    simple = ("a|b+| ?c", r"x(?= \d)|y", r"\s+", " {2,}", r"[^\s\p{L}]+", "ab", r"\p{N}{1,3}")
    for pattern in (*KNOWN, *simple):
        assert bounds(tmp_path, pre_tokenizer=split(pattern)).is_listed, pattern
    for pattern in (
        "(a|aa)+$",
        "a*a*b",
        "a+b",
        f"{LLAMA3}|x*x*y",
        r"(\w)\1",
        "(?=a)a",
        r"\s+(?!\S)",
        "x" * 300,
        "a+(?=b)",
        "a?a?a?a",
        "a|b+c",
    ):
        assert not bounds(tmp_path, pre_tokenizer=split(pattern)).is_listed, pattern
    path = SHIPPED / "tokenizer.json"
    assert read_bounds(path, path.read_bytes(), TextFiles.read(SHIPPED)).is_listed


STRIPPED: dict[str, tuple[dict[str, Any], bool]] = {
    "white space": ({"added_tokens": [token("  ", lstrip=True)]}, False),
    "wide white space": ({"added_tokens": [token("\u3000", rstrip=True)]}, False),
    "white space by itself": ({"added_tokens": [token("  ")]}, True),
    "a mask": ({"added_tokens": [token("<mask>", lstrip=True)]}, True),
    "a mask, normalized": (
        {"normalizer": {"type": "NFC"}, "added_tokens": [token("<mask>", lstrip=True, normalized=True)]},
        True,
    ),
    "becomes white space": (
        {"normalizer": replace("x", " "), "added_tokens": [token("x", lstrip=True, normalized=True)]},
        False,
    ),
    "as white space beside others": (
        {"normalizer": replace("x", " "), "added_tokens": [token("x", lstrip=True)]},
        True,
    ),
}


@pytest.mark.parametrize("name", STRIPPED)
def test_added_tokens_that_strip_a_run_of_spaces_again_and_again_keep_a_tokenizer_out(
    tmp_path: Path, name: str
) -> None:
    """16,000 spaces took 0.65 s."""
    parts, is_listed = STRIPPED[name]
    assert bounds(tmp_path, **parts).is_listed == is_listed


DELETED: dict[str, tuple[dict[str, Any], str]] = {
    "replaced": (replace("0", ""), "0"),
    "replaced by a pattern": ({"type": "Replace", "pattern": {"Regex": "\\d"}, "content": ""}, "0"),
    "stripped": ({"type": "Strip", "strip_left": True, "strip_right": True}, " "),
    "a lone accent": ({"type": "StripAccents"}, "\u0301"),
    "a control character": ({"type": "Nmt"}, "\x01"),
    "cleaned": (json.loads(normalizers.BertNormalizer().__getstate__()), "\x01"),
}


@pytest.mark.parametrize("name", DELETED)
def test_added_tokens_of_which_a_normalizer_may_leave_nothing_keep_a_tokenizer_out(tmp_path: Path, name: str) -> None:
    """With two such tokens, the library does not come back from a text of one character."""
    normalizer, content = DELETED[name]
    assert bounds(tmp_path, normalizer=normalizer, added_tokens=[token(content)]).is_listed
    assert not bounds(tmp_path, normalizer=normalizer, added_tokens=[token(content, normalized=True)]).is_listed


def test_added_tokens_of_other_files_keep_a_tokenizer_out_of_the_node_as_well(tmp_path: Path) -> None:
    directory = write_text_model(tmp_path)
    path, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
    old = json.loads(settings.read_text())
    for entry, is_listed in (
        ({"content": "<mask>", "lstrip": True, "special": True}, True),
        ({"content": "  ", "lstrip": True, "special": True}, False),
        ({"content": "x" * 300}, False),
    ):
        settings.write_text(json.dumps({**old, "added_tokens_decoder": {"400": entry}}))
        assert read_bounds(path, path.read_bytes(), TextFiles.read(directory)).is_listed == is_listed, entry


def test_long_added_tokens_keep_a_tokenizer_out_of_the_node(tmp_path: Path) -> None:
    assert bounds(tmp_path, added_tokens=[token("a"), token("a" * 200 + "b")]).is_listed
    assert not bounds(tmp_path, added_tokens=[token("a"), token("a" * 300 + "b")]).is_listed


def test_the_values_of_a_file_are_counted_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """15 million numbers under an unknown name of the model took 1.4 GB."""
    monkeypatch.setattr(tokenizer_bounds, "MAX_VALUES", 10_000)
    check_text_files(write_text_model(tmp_path))
    text = json.dumps(json.loads((tmp_path / "tokenizer.json").read_text()), separators=(",", ":"))
    numbers, lists, names = "0," * 10_000 + "0", "[" * 5 + "0" + "]" * 5, {f"z{i}": i for i in range(5000)}
    for junk in (f"[{numbers}]", f"[{','.join([lists] * 2000)}]", json.dumps(names)):
        for before in ("{", '"model":{', '"added_tokens":[{', '"vocab":{'):
            place = text.index(before) + len(before)
            (tmp_path / "tokenizer.json").write_text(f'{text[:place]}"junk":{junk},{text[place:]}')
            with pytest.raises(ModelError, match=r"values and names; at most 10000"):
                check_text_files(tmp_path)


def test_a_vocabulary_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_bounds, "MAX_VOCABULARY", 500)
    check_text_files(write_text_model(tmp_path))
    with pytest.raises(ModelError, match="601 tokens; at most 500"):
        bounds(tmp_path, model={"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], *([["a", -1.0]] * 600)]})


def test_other_slow_parts_keep_a_tokenizer_out_of_the_node(tmp_path: Path) -> None:
    pieces = {"type": "WordPiece", "unk_token": "x", "continuing_subword_prefix": "", "vocab": {"x": 0}}
    assert bounds(tmp_path, model={**pieces, "max_input_chars_per_word": 100}).is_listed
    assert not bounds(tmp_path, model={**pieces, "max_input_chars_per_word": 10**6}).is_listed
    assert not bounds(tmp_path, model={"type": "Unigram", "unk_id": 0, "vocab": [["a" * 500, 0.0]]}).is_listed
    assert bounds(tmp_path, model={"type": "Unigram", "unk_id": 0, "vocab": [["a" * 50, 0.0]] * 9}).is_listed
    assert not bounds(tmp_path, normalizer=row("normalizers", *[{"type": "Strip"}] * 33)).is_listed


def test_ascii_texts_are_light_although_others_may_grow(tmp_path: Path) -> None:
    found = bounds(tmp_path, normalizer={"type": "NFKC"}, pre_tokenizer=None)
    assert (found.growth, found.ascii_growth) == (18, 1)
    found = bounds(tmp_path, normalizer=row("normalizers", replace("a", "ﷺ"), {"type": "NFKC"}), pre_tokenizer=None)
    assert found.ascii_growth == 18, "what was ASCII may be something else after the first step"


def test_all_kinds_of_the_library_have_a_bound() -> None:
    makers: dict[str, tuple[Any, ...]] = {
        "Prepend": ("▁",),
        "Replace": ("a", "b"),
        "Precompiled": (b"",),
        "Sequence": ([],),
    }
    makers |= {"CharDelimiterSplit": ("a",), "Split": ("a", "isolated")}
    for module, table in (
        (normalizers, tokenizer_bounds._NORMALIZERS),
        (pre_tokenizers, tokenizer_bounds._PRE_TOKENIZERS),
        (decoders, tokenizer_bounds._DECODERS),
    ):
        base = {"NORMALIZERS", "Normalizer", "PreTokenizer", "Decoder", "DecodeStream", "Sequence", "Precompiled"}
        for name in {name for name in vars(module) if name[0].isupper()} - base:
            made = getattr(module, name)(*makers.get(name, ()))
            assert json.loads(made.__getstate__())["type"] in table, name


def test_no_character_grows_beyond_the_bound_of_its_normalizer() -> None:
    everything = map(chr, [*range(0xD800), *range(0xE000, sys.maxunicode + 1)])
    odd = [c for c in everything if unicodedata.decomposition(c) or c.lower() != c] + ["가", "一", "🙂", "▁"]
    for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer", "StripAccents", "Nmt", "ByteLevel"):
        real, bound = getattr(normalizers, name)(), tokenizer_bounds._NORMALIZERS[name]({}, tokenizer_bounds._ANY)[0]
        most = max(len(real.normalize_str(c)) for c in odd)
        assert most <= bound, (name, most)
    for name in ("NFKC", "NFKD", "Lowercase", "BertNormalizer"):
        assert all(len(getattr(normalizers, name)().normalize_str(c)) <= 1 for c in [*map(chr, range(128)), "▁"])

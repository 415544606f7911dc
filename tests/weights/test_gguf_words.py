"""Tokenizers made from GGUF files give the ids that llama.cpp itself gives for the same file, for every known name."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

pytest.importorskip("xllamacpp")
pytest.importorskip("gguf")

from exo_mesh_llamacpp.library import Library, open_library
from exo_mesh_llamacpp.library_file import packaged_library

from exo_mesh.weights.gguf_splitting import SPLITTINGS
from exo_mesh.weights.gguf_tokenizer import make_tokenizer
from tests.support.gguf_bytes import BOOL, F32, TEXT, U32, gguf_bytes, value
from tests.weights.test_gguf_tokenizer import (
    CORPUS,
    KINDS,
    TEXTS,
    byte_level_file,
    pieces,
    sentence_pieces_file,
    trained,
)

__all__ = ["pieces"]

Ids = Callable[[str], list[int]]

CASED = {"gpt-4o", "kanana2", "llama4", "minimax-m2", "tekken"}
NFC = {name for name, splitting in SPLITTINGS.items() if splitting.nfc}


@pytest.fixture(scope="module")
def library() -> Library:
    opened = open_library(packaged_library())
    opened.call.llama_tokenize.argtypes = [
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool,
    ]  # fmt: skip
    return opened


@pytest.fixture(scope="module")
def original() -> Tokenizer:
    pre, normalizer, _ = KINDS["llama-bpe"]
    return trained(pre, normalizer)


def vocabulary_file(file: Path, header: Any, **more: bytes) -> Path:
    """Write the tokenizer of a header as a file that llama.cpp loads without weights."""
    keys = {"embedding_length": 32, "block_count": 1, "attention.head_count": 2, "context_length": 64,
            "feed_forward_length": 32}  # fmt: skip
    entries = {"general.architecture": value(TEXT, "llama")}
    entries |= {f"llama.{key}": value(U32, number) for key, number in keys.items()}
    entries |= {"llama.attention.layer_norm_rms_epsilon": value(F32, 1e-5)}
    entries |= {f"tokenizer.ggml.{key}": body for key, body in more.items()}
    for key, one in header.metadata.items():
        entries[key] = value(*_typed(one))
    file.write_bytes(gguf_bytes(entries))
    return file


def _typed(one: Any) -> tuple[int, Any]:
    if isinstance(one, bool):
        return BOOL, one
    if isinstance(one, str):
        return TEXT, one
    if isinstance(one, int):
        return U32, one
    return 9, (one.kind, list(one.texts() if one.is_text else one.numbers()))


@pytest.fixture
def theirs(library: Library, tmp_path: Path) -> Iterator[Callable[[Any], Ids]]:
    """Loads a header's tokenizer in llama.cpp; the result gives the ids of a text."""
    loaded: list[int] = []

    def load(header: Any) -> Ids:
        params = library.call.llama_model_default_params()
        params.vocab_only = True
        library.forget_log()
        path = vocabulary_file(tmp_path / "words.gguf", header)
        handle = library.call.llama_model_load_from_file(str(path).encode(), params)
        assert handle, library.last_error()
        loaded.append(handle)
        vocabulary = library.call.llama_model_get_vocab(handle)

        def ids(text: str) -> list[int]:
            raw = text.encode()
            room = (ctypes.c_int32 * (len(raw) + 16))()
            count = library.call.llama_tokenize(vocabulary, raw, len(raw), room, len(room), True, True)
            assert count >= 0
            return list(room[:count])

        return ids

    yield load
    for handle in loaded:
        library.call.llama_model_free(handle)


@pytest.mark.parametrize("name", sorted(SPLITTINGS))
def test_words_are_cut_as_llama_cpp_cuts_them(name: str, original: Tokenizer, theirs: Callable[[Any], Ids]) -> None:
    ids = original.get_vocab()
    header = byte_level_file(
        original, name, bos_token_id=value(U32, ids["<|user|>"]), eos_token_id=value(U32, ids["<|end|>"])
    )
    made = Tokenizer.from_str(json.dumps(make_tokenizer(header)))
    expected = theirs(header)
    for text in [*TEXTS, *CORPUS[-2:]]:
        if name in NFC and "\u0301" in text:
            continue  # the tokenizers of these families normalise first; llama.cpp does not
        if name in CASED and "हिन्दी" in text:
            continue  # the patterns of these families take marks for letters; llama.cpp does not
        assert made.encode(text).ids == expected(text), (text[:80], made.encode(text).tokens[:40])


def test_sentence_pieces_are_those_of_llama_cpp(pieces: Any, theirs: Callable[[Any], Ids]) -> None:
    header = sentence_pieces_file(pieces)
    made = Tokenizer.from_str(json.dumps(make_tokenizer(header)))
    expected = theirs(header)
    for text in [one for one in TEXTS if one]:
        assert made.encode(text).ids == expected(text), (text[:80], made.encode(text).tokens[:40])

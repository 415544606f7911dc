"""Makes tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

Two kinds of tokenizers are read. `gpt2`: byte-level BPE with a list of merges; how text is cut into words follows from
its name. `llama`: SentencePiece's BPE, which merges the pair with the best score, and writes unknown characters as
bytes; its merges follow from the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from exo_mesh.errors import ModelError
from exo_mesh.weights.gguf import GgufHeader
from exo_mesh.weights.gguf_splitting import SPLITTINGS, normalizer, pre_tokenizer
from exo_mesh.weights.model_files import shown

MAX_TOKENS = 1_000_000
MAX_MERGES = 1_000_000
"""Most merges. The largest known vocabularies have about 520,000."""

MAX_PIECE = 256
"""Characters of a token of SentencePiece that is made of merges; each of its cuts is a possible merge."""

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_TYPE_NAMES = {_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE}
_SPACE = "▁"
_NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
}
"""Tokens with a name in the metadata, where `seperator` is misspelt, and their names in templates."""


def make_tokenizer(header: GgufHeader) -> dict[str, Any]:
    """The content of tokenizer.json. Raises ModelError for a kind of tokenizer that is not supported, by its name."""
    kind = header.text("tokenizer.ggml.model")
    if kind == "gpt2":
        return _Vocabulary(header).byte_level()
    if kind == "llama":
        return _Vocabulary(header).sentence_pieces()
    raise ModelError(f'its tokenizer "{kind[:100]}" is not supported; known: gpt2 and llama')


def make_tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """The content of tokenizer_config.json: the tokens with a name, and the chat templates. Raises ModelError."""
    tokens = list(_texts(header, "tokenizer.ggml.tokens", MAX_TOKENS))
    config: dict[str, Any] = {}
    for key, name in _NAMES.items():
        token_id = header.integer(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            config[name] = tokens[token_id]
    template = header.text("tokenizer.chat_template")
    tool_use = header.text("tokenizer.chat_template.tool_use")
    if template and tool_use:
        named = [{"name": "default", "template": template}, {"name": "tool_use", "template": tool_use}]
        return {**config, "chat_template": named}
    return {**config, "chat_template": template} if template else config


def _texts(header: GgufHeader, key: str, most: int) -> Sequence[str]:
    array = header.array(key)
    if array is None or not array.is_text or not 0 < array.length <= most:
        raise ModelError(f"it has no usable {key}")
    return tuple(array.texts())


class _Vocabulary:
    """The tokens of a file, with their types, and how they become a tokenizer."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self._tokens = _texts(header, "tokenizer.ggml.tokens", MAX_TOKENS)
        types = header.array("tokenizer.ggml.token_type")
        self._types: Sequence[Any] = (_NORMAL,) * len(self._tokens) if types is None else types.numbers()
        if len(self._types) != len(self._tokens):
            raise ModelError(f"it has {len(self._tokens)} tokens, but {len(self._types)} types of tokens")

    def byte_level(self) -> dict[str, Any]:
        """A tokenizer.json of byte-level BPE."""
        name = self._header.text("tokenizer.ggml.pre", "default")
        splitting = SPLITTINGS.get(name)
        if splitting is None:
            raise ModelError(f'its tokenizer cuts text in a way that is not known ("{name[:100]}")')
        vocabulary = self._ids()
        merges = []
        for merge in _texts(self._header, "tokenizer.ggml.merges", MAX_MERGES):
            left, _, right = merge.partition(" ")
            if not left or not right or " " in right:
                raise ModelError(f"its tokenizer has an impossible merge: {shown(merge)}")
            if left in vocabulary and right in vocabulary and left + right in vocabulary:
                merges.append([left, right])
        model = _bpe(vocabulary, merges, ignore_merges=splitting.whole_words)
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return self._whole(
            model,
            normalizer(splitting),
            pre_tokenizer(splitting),
            self._post_processor(begins=splitting.begins, after=[byte_level]),
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        )

    def sentence_pieces(self) -> dict[str, Any]:
        """A tokenizer.json of SentencePiece's BPE."""
        scores = self._header.array("tokenizer.ggml.scores")
        if scores is None or scores.length != len(self._tokens):
            raise ModelError("it has no usable tokenizer.ggml.scores")
        vocabulary = self._ids()
        merges = self._merges_of_scores(vocabulary, scores.numbers())
        unknown = self._header.integer("tokenizer.ggml.unknown_token_id")
        has_bytes = any(kind == _BYTE for kind in self._types)
        named = self._tokens[unknown] if unknown is not None and 0 <= unknown < len(self._tokens) else None
        model = _bpe(vocabulary, merges, byte_fallback=has_bytes, fuse_unk=True, unk_token=named)
        prefixed = self._header.flag("tokenizer.ggml.add_space_prefix", True)
        prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
        spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        decoders = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        return self._whole(
            model,
            {"type": "Sequence", "normalizers": [*prepend, replaced]},
            None,
            self._post_processor(begins=True, after=[]),
            {"type": "Sequence", "decoders": decoders},
        )

    def _ids(self) -> dict[str, int]:
        """{token: id}. Of two equal tokens the first counts. Rows of the embedding without a token are left out."""
        vocabulary: dict[str, int] = {}
        for token_id, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            if kind not in _TYPE_NAMES:
                raise ModelError(f"its token {token_id} has the unknown type {shown(kind)}")
            if kind != _UNUSED or not token.startswith("[PAD"):
                vocabulary.setdefault(token, token_id)
        return vocabulary

    def _merges_of_scores(self, vocabulary: dict[str, int], scores: Sequence[Any]) -> list[list[str]]:
        """All pairs of tokens that make another token, the best first: by the score of what they make, and for equal
        scores in the order in which transformers has them. Tokens that a user has defined are found before anything is
        merged."""
        found: list[tuple[float, int, int, list[str]]] = []
        for token, token_id in vocabulary.items():
            if self._types[token_id] != _NORMAL or not 1 < len(token) <= MAX_PIECE:
                continue
            score = float(scores[token_id])
            if math.isnan(score):
                raise ModelError(f"the score of its token {token_id} is not a number")
            local = []
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocabulary and right in vocabulary:
                    local.append((vocabulary[left], vocabulary[right], [left, right]))
            local.sort(key=lambda one: one[:2])
            found += [(-score, -len(pair[0]), -len(pair[1]), pair) for _, _, pair in local]
            if len(found) > MAX_MERGES:
                raise ModelError(f"its tokenizer has more than {MAX_MERGES} merges")
        found.sort(key=lambda one: one[:3])
        return [pair for *_, pair in found]

    def _post_processor(self, *, begins: bool, after: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Adds the tokens that begin and end a text, if the file says so."""
        starts = self._header.flag("tokenizer.ggml.add_bos_token", begins)
        ends = self._header.flag("tokenizer.ggml.add_eos_token", False)
        first = self._named("bos") if starts else None
        last = self._named("eos") if ends else None
        single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        special = {}
        for is_first, found in ((True, first), (False, last)):
            if found is None:
                continue
            token_id, token = found
            special[token] = {"id": token, "ids": [token_id], "tokens": [token]}
            one = {"SpecialToken": {"id": token, "type_id": 0}}
            single = [one, *single] if is_first else [*single, one]
            pair = [one, *pair] if is_first else [*pair, one]
        if special:
            after = [*after, {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}]
        if len(after) == 1:
            return after[0]
        return {"type": "Sequence", "processors": after} if after else None

    def _named(self, kind: str) -> tuple[int, str] | None:
        """(id, text) of a token with a name."""
        token_id = self._header.integer(f"tokenizer.ggml.{kind}_token_id")
        if token_id is None or not 0 <= token_id < len(self._tokens):
            return None
        return token_id, self._tokens[token_id]

    def _added(self) -> list[dict[str, Any]]:
        """Tokens that are found in text before it is cut into words."""
        added = []
        seen = set()
        for token_id, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            if kind in (_CONTROL, _USER, _UNKNOWN) and token and token not in seen:
                seen.add(token)
                plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
                added.append({"id": token_id, "content": token, **plain, "special": kind != _USER})
        return added

    def _whole(
        self,
        model: dict[str, Any],
        normal: dict[str, Any] | None,
        pre: dict[str, Any] | None,
        post: dict[str, Any] | None,
        decoder: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            "normalizer": normal,
            "pre_tokenizer": pre,
            "post_processor": post,
            "decoder": decoder,
            "model": model,
        }


def _bpe(vocabulary: dict[str, int], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    modes = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **plain, **modes, **settings, "vocab": vocabulary, "merges": merges}

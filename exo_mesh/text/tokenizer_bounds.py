"""Bounds on what a tokenizer.json can do to a text, computed from the document before a library reads it. Pure.

A tokenizer comes from a stranger. Its parts change a text before it is cut into tokens, and change tokens when they
become text again, so a small file can make a text of gigabytes from one character. Every kind of part that the
tokenizers library has is in a table here with the most by which it makes a text longer. A tokenizer beyond the bounds
cannot be used, and a part of another kind neither. No probe can replace this: a part may grow on one rare character.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import msgspec

from exo_mesh.errors import ModelError
from exo_mesh.weights.splitting_patterns import KNOWN

MAX_GROWTH = 10_000
"""Most characters that one character of a text may become before it is cut into tokens. The largest bound of a known
tokenizer is 3,888 (ALBERT's, whose parts never grow all at once)."""

MAX_DECODED_GROWTH = 16
"""Most characters that one character of a token may become; known decoders have at most 2."""

MAX_ADDED = 100_000
"""Most added tokens; the largest known tokenizers, with sounds and pictures as tokens, have some 65,000."""

MAX_ADDED_LENGTH = 1024
"""Most characters of an added token; the longest known has some 200 (a row of spaces)."""

MAX_ADDED_GROWN = 1 << 21
"""Most characters of all added tokens, and of the tokens that the normalizer changes, when it has changed them. The
library searches for all at once, and builds a machine whose size is a multiple of theirs."""

MAX_LISTED_ADDED_LENGTH = 256
"""Most characters of an added token of a listed tokenizer. Where a short token begins a long one, the library looks for
the long one at each place of a text."""

MAX_VOCABULARY = 1 << 19
"""Most tokens of a vocabulary; the largest known has 262,144. The library needs 0.8 s and 120 MB for this many."""

MAX_VALUES = 3_000_000
"""Most values and names of a tokenizer.json, wherever they are; the largest known has 2.2 million, most of them in
merges. The library needs some 90 bytes for each, also where it does not know what they mean."""

MAX_PART_BYTES = 4 << 20
"""Largest normalizer, pre-tokenizer, post-processor or decoder; a table of characters of SentencePiece has 0.5 MB."""

MAX_TOKENS_AROUND = 1000
"""Most tokens that a post-processor may put around a text, over all its parts."""

MAX_TOKEN_BYTES = 4096
"""Tokens up to this size are always accepted, tokens of twice the size never; the longest known has 512 bytes."""

MAX_FIELD = 256
"""Most characters of the texts that a model puts before or after parts of words."""

SHORT_TOKEN_BYTES = 128
"""Tokens up to this size are short for a Unigram model, which compares every place of a text with every length."""

MAX_LISTED_WORD = 1000
"""Longest word that WordPiece cuts in quadratic time and is listed; the usual limit is 100."""

MAX_LISTED_STEPS = 32
"""Most parts of a listed tokenizer."""

NODE_LENGTH = 1 << 14
"""Most characters of a text that a node encodes itself, which takes 10 to 20 ms and stops all its other work."""

NODE_GROWN_LENGTH = 1 << 16
"""The same for the text after its normalizer, at the most that the bounds allow."""

_ASCII, _INERT, _ANY = range(3)
"""What a text may hold: ASCII; also "▁", which no Unicode form changes; or any character."""

_Node = Mapping[str, Any]
_Step = tuple[int, int]
"""(growth, what the text may hold afterwards)."""


class ModelPart(msgspec.Struct):
    """The model of a tokenizer.json. The vocabulary is not decoded, because that takes much memory."""

    type: str | None = None
    vocab: msgspec.Raw = msgspec.Raw(b"{}")
    max_input_chars_per_word: int | None = None
    unk_token: Any = None
    continuing_subword_prefix: Any = None
    end_of_word_suffix: Any = None


class TokenPart(msgspec.Struct):
    """An added token of a tokenizer.json, or of another file of the model."""

    id: int
    content: str = ""
    normalized: bool = True
    lstrip: bool = False
    rstrip: bool = False


class TokenizerFile(msgspec.Struct):
    """A tokenizer.json, as far as its bounds need it."""

    model: ModelPart
    added_tokens: list[TokenPart] | None = None
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")

    def next_id(self) -> int:
        """The id of the next token that is added. It decodes the vocabulary, which needs memory."""
        vocabulary = msgspec.json.decode(self.model.vocab)
        size = len(vocabulary) if isinstance(vocabulary, dict | list) else 0
        return max([size, *(token.id + 1 for token in self.added_tokens or ())])


class TokenizerBounds(msgspec.Struct, frozen=True):
    """growth: the most characters that a character of a text becomes. ascii_growth: the same for a text in ASCII.
    is_listed: every part takes time in proportion to a text, so a node may use it for short texts."""

    growth: int
    ascii_growth: int
    is_listed: bool

    def is_light(self, text: str) -> bool:
        """Whether a node may encode this text in its own process."""
        if not self.is_listed or len(text) > NODE_LENGTH:
            return False
        return len(text) * (self.ascii_growth if text.isascii() else self.growth) <= NODE_GROWN_LENGTH


def check_values(data: bytes) -> None:
    """Raises ModelError for a tokenizer.json with too many values, before anything decodes it. Brackets, commas and
    colons in texts count, too."""
    if (num := sum(map(data.count, (b",", b":", b"[", b"{")))) > MAX_VALUES:
        raise ModelError(f"it has {num} values and names; at most {MAX_VALUES} are allowed")


def bounds_of(file: TokenizerFile, further: Iterable[TokenPart] = ()) -> TokenizerBounds:
    """The bounds of a tokenizer. further: tokens that other files of the model add. Raises ModelError beyond them, and
    the errors of msgspec for a part that is no JSON."""
    normalizer, pre_tokenizer = _part(file.normalizer, "normalizer"), _part(file.pre_tokenizer, "pre-tokenizer")
    decoder, post_processor = _part(file.decoder, "decoder"), _part(file.post_processor, "post-processor")
    growths = []
    for holds in (_ANY, _ASCII):
        grown, then = _growth(normalizer, _NORMALIZERS, holds, "normalizer")
        cut, _ = _growth(pre_tokenizer, _PRE_TOKENIZERS, then, "pre-tokenizer")
        growths.append(grown * cut)
    _limit("its normalizer and pre-tokenizer can make a text", growths[0], MAX_GROWTH)
    decoded, _ = _growth(decoder, _DECODERS, _ANY, "decoder")
    _limit("its decoder can make a text", decoded, MAX_DECODED_GROWTH)
    if not all(map(_is_simple, _patterns(decoder))):
        raise ModelError("its decoder has a regular expression whose time has no bound")
    num_around, copies = _around(post_processor)
    if num_around > MAX_TOKENS_AROUND or copies > 2:
        raise ModelError(
            f"its post-processor puts {num_around} tokens around a text and writes the text {copies} times; at most "
            f"{MAX_TOKENS_AROUND} tokens and 2 times are allowed"
        )
    added = [*(file.added_tokens or ()), *further]
    _check_added(added, _growth(normalizer, _NORMALIZERS, _ANY, "normalizer")[0])
    _check_model(file.model)
    steps = [*_steps(normalizer), *_steps(pre_tokenizer), *_steps(decoder)]
    patterns = [*_patterns(normalizer), *_patterns(pre_tokenizer)]
    is_listed = (
        len(steps) <= MAX_LISTED_STEPS
        and all(pattern in KNOWN or _is_simple(pattern) for pattern in patterns)
        and (file.model.max_input_chars_per_word or 0) <= MAX_LISTED_WORD
        and max((len(token.content) for token in added), default=0) <= MAX_LISTED_ADDED_LENGTH
        and not any(_strips_again(token, _steps(normalizer)) for token in added)
        and not (any(token.normalized for token in added) and any(map(_may_delete, _steps(normalizer))))
        and not (file.model.type in ("Unigram", None) and _has_long_text(file.model.vocab, SHORT_TOKEN_BYTES))
    )
    return TokenizerBounds(growths[0], growths[1], is_listed)


def _limit(what: str, growth: int, most: int) -> None:
    if growth > most:
        shown = str(growth) if growth < 10**12 else "more than a million million"
        raise ModelError(f"{what} {shown} times longer; at most {most} times is allowed")


def _part(raw: msgspec.Raw, name: str) -> Any:
    if len(bytes(raw)) > MAX_PART_BYTES:
        raise ModelError(f"its {name} has {len(bytes(raw))} bytes; at most {MAX_PART_BYTES} are allowed")
    return msgspec.json.decode(raw)


def _steps(node: Any) -> list[_Node]:
    """The parts of a part, in their order: the parts of a Sequence, which may hold others."""
    if not isinstance(node, dict):
        return []
    if node.get("type") != "Sequence":
        return [node]
    inner = [node[name] for name in _INNER if isinstance(node.get(name), list)]
    return [step for one in chain(*inner) for step in _steps(one)]


_INNER = ("normalizers", "pretokenizers", "decoders", "processors")


def _growth(node: Any, table: Mapping[str, Callable[[_Node, int], _Step]], holds: int, name: str) -> _Step:
    """The growth of a part, and what a text may hold after it that held this before."""
    growth = 1
    for step in _steps(node):
        kind = step.get("type")
        if not isinstance(kind, str) or kind not in table:
            raise ModelError(f"its {name} is of the kind {str(kind)[:100]!r}, which is not supported")
        times, holds = table[kind](step, holds)
        growth *= times
    return growth, holds


def _same(_node: _Node, holds: int) -> _Step:
    return 1, holds


def _unicode(most: int) -> Callable[[_Node, int], _Step]:
    """A Unicode form, by which a character becomes at most so many; it leaves ASCII and "▁" alone."""
    return lambda _node, holds: (1, holds) if holds < _ANY else (most, _ANY)


def _bytes(_node: _Node, holds: int) -> _Step:
    """A character for each byte of a character, and before each word one for a space, if it adds that; a model's other
    files may turn that on."""
    return (2 if holds == _ASCII else 5), _ANY


def _replace(node: _Node, holds: int) -> _Step:
    content, pattern = _text(node, "content"), node.get("pattern")
    exact = pattern.get("String") if isinstance(pattern, dict) else None
    if (
        not isinstance(exact, str) or not exact
    ):  # an empty text is between any two characters; an expression may find it
        return 1 + len(content), max(holds, _held(content))
    growth = max(1, -(-len(content) // len(exact)))
    return growth, max(holds, _held(content))


def _prepend(node: _Node, holds: int) -> _Step:
    return 1 + len(_text(node, "prepend")), max(holds, _held(_text(node, "prepend")))


def _precompiled(node: _Node, _holds: int) -> _Step:
    """SentencePiece's table: a trie, and the texts by which characters are replaced, each with a zero at its end."""
    try:
        table = b64decode(_text(node, "precompiled_charsmap"), validate=True)
    except (Base64Error, ValueError) as exc:
        raise ModelError(f"its normalizer has a table of characters that is not base64: {exc}") from exc
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max((len(text.decode("utf-8", "replace")) for text in texts.split(b"\0")), default=1) or 1, _ANY


def _metaspace(node: _Node, holds: int) -> _Step:
    return 2, max(holds, _held(_text(node, "replacement")))


def _suffix(node: _Node, holds: int) -> _Step:
    return (1 if _text(node, "suffix") else 2), holds


def _ctc(node: _Node, holds: int) -> _Step:
    return prod(1 if _text(node, name) else 2 for name in ("pad_token", "word_delimiter_token")), holds


def _space_before(_node: _Node, holds: int) -> _Step:
    return 2, holds


_NORMALIZERS: Mapping[str, Callable[[_Node, int], _Step]] = {
    "BertNormalizer": _unicode(12),
    "ByteLevel": _bytes,
    "Lowercase": _unicode(3),
    "NFC": _unicode(3),
    "NFD": _unicode(4),
    "NFKC": _unicode(18),
    "NFKD": _unicode(18),
    "Nmt": _same,
    "Precompiled": _precompiled,
    "Prepend": _prepend,
    "Replace": _replace,
    "Strip": _same,
    "StripAccents": _same,
}

_PRE_TOKENIZERS: Mapping[str, Callable[[_Node, int], _Step]] = {
    "BertPreTokenizer": _same,
    "ByteLevel": _bytes,
    "CharDelimiterSplit": _same,
    "Delimiter": _same,
    "Digits": _same,
    "FixedLength": _same,
    "Metaspace": _metaspace,
    "Punctuation": _same,
    "Split": _same,
    "UnicodeScripts": _same,
    "Whitespace": _same,
    "WhitespaceSplit": _same,
}

_DECODERS: Mapping[str, Callable[[_Node, int], _Step]] = {
    "BPEDecoder": _suffix,
    "ByteFallback": _same,
    "ByteLevel": _same,
    "CTC": _ctc,
    "Fuse": _same,
    "Metaspace": _same,
    "Replace": _replace,
    "Strip": _same,
    "WordPiece": _space_before,
}


def _text(node: _Node, name: str) -> str:
    found = node.get(name)
    return found if isinstance(found, str) else ""


def _held(text: str) -> int:
    return _ASCII if text.isascii() else _INERT if text.replace("▁", "").isascii() else _ANY


def _patterns(node: Any) -> list[str]:
    """The regular expressions of a part."""
    patterns = [step.get("pattern") for step in _steps(node)]
    return [str(pattern["Regex"]) for pattern in patterns if isinstance(pattern, dict) and "Regex" in pattern]


_CLASS = r"\\[sSdDwWnrt]|\\[pP]\{\w{1,40}\}|\\[^\w\s]"
_ATOM = rf"(?:[^\\\[\](){{}}|*+?.^$]|\.|{_CLASS}|\[\^?(?:[^\\\[\]&]|{_CLASS})+\])"
_END = rf"(?:[*+?]|\{{\d{{1,3}}(?:,\d{{0,3}})?\}}|\(\?[=!]{_ATOM}{{1,4}}\))?"
_BRANCH = rf"\^?(?:{_ATOM}*{_ATOM}\?){{0,2}}{_ATOM}*{_ATOM}{_END}"
_SIMPLE = re.compile(rf"{_BRANCH}(?:\|{_BRANCH})*")
_MAX_SIMPLE = 200


def _is_simple(pattern: str) -> bool:
    """Whether a regular expression takes time in proportion to a text: its branches are rows of characters and classes,
    of which the last one may be repeated, or be before a short look ahead. Nothing follows a repetition, so none is
    tried again."""
    return len(pattern) <= _MAX_SIMPLE and _SIMPLE.fullmatch(pattern) is not None


def _around(node: Any) -> tuple[int, int]:
    """(tokens that a post-processor puts around a text, how often it writes the text)."""
    num, copies = 0, 1
    for step in _steps(node):
        match step.get("type"):
            case "ByteLevel":
                pass
            case "BertProcessing" | "RobertaProcessing":
                num += 4
            case "TemplateProcessing":
                templates = [step.get("single"), step.get("pair")]
                more = [_around_template(one, step.get("special_tokens")) for one in templates]
                num, copies = num + max(one[0] for one in more), copies * max(1, *(one[1] for one in more))
            case kind:
                raise ModelError(f"its post-processor is of the kind {str(kind)[:100]!r}, which is not supported")
    return num, copies


def _around_template(pieces: Any, special: Any) -> tuple[int, int]:
    """The same for one template of a TemplateProcessing."""
    num, texts = 0, []
    for piece in pieces if isinstance(pieces, list) else ():
        if not isinstance(piece, dict):
            raise ModelError("its post-processor has a template that is not a list of pieces")
        if isinstance(sequence := piece.get("Sequence"), dict):
            texts.append(str(sequence.get("id")))
        elif isinstance(token := piece.get("SpecialToken"), dict):
            entry = special.get(token.get("id")) if isinstance(special, dict) else None
            ids = entry.get("ids") if isinstance(entry, dict) else None
            num += max(1, len(ids)) if isinstance(ids, list) else 1
    return num, max((texts.count(one) for one in set(texts)), default=0)


def _check_added(tokens: Sequence[TokenPart], growth: int) -> None:
    if len(tokens) > MAX_ADDED:
        raise ModelError(f"it has {len(tokens)} added tokens; at most {MAX_ADDED} are allowed")
    total = sum(len(token.content) for token in tokens)
    if total > MAX_ADDED_GROWN:
        raise ModelError(f"its added tokens have {total} characters; at most {MAX_ADDED_GROWN} are allowed")
    longest = max((len(token.content) for token in tokens), default=0)
    if longest > MAX_ADDED_LENGTH:
        raise ModelError(f"an added token has {longest} characters; at most {MAX_ADDED_LENGTH} are allowed")
    grown = growth * sum(len(token.content) for token in tokens if token.normalized)
    if grown > MAX_ADDED_GROWN:
        raise ModelError(
            f"its normalizer can make its added tokens {grown} characters long; at most {MAX_ADDED_GROWN} are allowed"
        )


def _strips_again(token: TokenPart, normalizer: Sequence[_Node]) -> bool:
    """Whether a text may have an added token many times in one run of white space. If such a token takes the white
    space beside it, the library looks at the whole run for each."""
    if not (token.lstrip or token.rstrip):
        return False
    return token.content.isspace() or (
        token.normalized and any(step.get("type") in _SPACE_MAKERS for step in normalizer)
    )


_SPACE_MAKERS = ("BertNormalizer", "Nmt", "Precompiled", "Replace", "StripAccents")
"""Normalizers that make white space of other characters, or leave characters out."""


def _may_delete(step: _Node) -> bool:
    """Whether a normalizer may leave nothing of a text. Where it leaves nothing of an added token, the library finds
    that token between all characters, and together with another added token it searches the same place for ever."""
    return step.get("type") in _DELETERS or (step.get("type") == "Replace" and not step.get("content"))


_DELETERS = ("BertNormalizer", "Nmt", "Precompiled", "Strip", "StripAccents")


def _check_model(model: ModelPart) -> None:
    for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        field = getattr(model, name)
        if isinstance(field, str) and len(field) > MAX_FIELD:
            raise ModelError(f"its model has a {name} of {len(field)} characters; at most {MAX_FIELD} are allowed")
    if (num := bytes(model.vocab).count(b'"') // 2) > MAX_VOCABULARY:
        raise ModelError(f"its vocabulary has {num} tokens; at most {MAX_VOCABULARY} are allowed")
    if _has_long_text(model.vocab, MAX_TOKEN_BYTES):
        raise ModelError(f"a token of its vocabulary has more than {MAX_TOKEN_BYTES} bytes, which is not supported")


def _has_long_text(raw: msgspec.Raw, most: int) -> bool:
    """Whether a text inside JSON has more bytes than this: true from twice as many on, false up to as many. It looks
    for steps of so many bytes without a quotation mark, so it need not look at every byte."""
    data = bytes(raw).replace(b'\\"', b"")
    return any(data.find(b'"', at, at + most) < 0 for at in range(0, len(data) - most + 1, most))

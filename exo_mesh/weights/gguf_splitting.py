"""How byte-level tokenizers cut text into words before they merge, by the names that GGUF files use. Pure.

GGUF files name the tokenizer (`tokenizer.ggml.pre`) instead of holding its rules, so the rules of each known one are
here. An unknown name is refused: other rules would give other tokens for some texts, without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{ending}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{ending}}"
    rf"|{{digits}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = _CASED.replace("{ending}", f"{_CONTRACTIONS}?").replace("{digits}", r"\p{N}{1,3}")
_TEKKEN = _CASED.replace("{ending}", "").replace("{digits}", r"\p{N}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """The rules of one name. patterns: regular expressions, applied one after the other; empty for GPT-2's own.
    single_digits: every digit is a word. whole_words: a word that is a token is not merged. nfc: the text is
    normalised first. begins: whether a text begins with the first token if the file does not say."""

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    begins: bool = False


_GPT2 = Splitting()
_OF_LLAMA3 = Splitting((_LLAMA3,), whole_words=True, begins=True)
_LIKE_LLAMA3 = Splitting((_LLAMA3,))
_OF_QWEN2 = Splitting((_QWEN2,), nfc=True)
_DIGITS = Splitting(single_digits=True)
_OF_GPT4O = Splitting((_GPT4O,))
_OF_DEEPSEEK3 = Splitting(_DEEPSEEK3)

SPLITTINGS: Mapping[str, Splitting] = {
    "gpt-2": _GPT2, "phi-2": _GPT2, "mpt": _GPT2, "olmo": _GPT2, "jina-es": _GPT2, "jina-de": _GPT2,
    "gigachat": _GPT2, "jais": _GPT2, "trillion": _GPT2, "a.x-4.0": _GPT2, "mellum": _GPT2, "granite-docling": _GPT2,
    "exaone4": _GPT2,
    "llama3": _OF_LLAMA3, "llama-v3": _OF_LLAMA3, "llama-bpe": _OF_LLAMA3, "falcon3": _OF_LLAMA3,
    "falcon-h1": _OF_LLAMA3, "lfm2": _OF_LLAMA3, "pixtral": _OF_LLAMA3, "midm-2.0": _OF_LLAMA3,
    "dbrx": _LIKE_LLAMA3, "smaug-bpe": _LIKE_LLAMA3, "glm4": _LIKE_LLAMA3, "chatglm-bpe": _LIKE_LLAMA3,
    "qwen2": _OF_QWEN2, "stablelm2": _OF_QWEN2, "hunyuan": Splitting((_QWEN2,)),
    "deepseek-r1-qwen": Splitting((_QWEN2,)), "qwen35": Splitting((_QWEN35,), nfc=True),
    "kormo": Splitting((_QWEN2,)), "megrez": Splitting((_QWEN2,)), "bailingmoe": Splitting((_QWEN2,)),
    "bailingmoe2": Splitting((_QWEN2,)), "llada-moe": Splitting((_QWEN2,)), "grok-2": Splitting((_QWEN2,)),
    "solar-open": Splitting((_QWEN2,)),
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "codeshell": _DIGITS, "command-r": _DIGITS,
    "exaone": _DIGITS, "minerva-7b": _DIGITS,
    "gpt-4o": _OF_GPT4O, "llama4": _OF_GPT4O, "kanana2": _OF_GPT4O, "minimax-m2": _OF_GPT4O,
    "tekken": Splitting((_TEKKEN,), whole_words=True, begins=True),
    "deepseek-v3": _OF_DEEPSEEK3, "hunyuan-dense": _OF_DEEPSEEK3, "joyai-llm": _OF_DEEPSEEK3,
}  # fmt: skip
"""{value of tokenizer.ggml.pre: rules}."""


def normalizer(splitting: Splitting) -> dict[str, Any] | None:
    """The normalizer of a tokenizer.json."""
    return {"type": "NFC"} if splitting.nfc else None


def pre_tokenizer(splitting: Splitting) -> dict[str, Any]:
    """The pre-tokenizer of a tokenizer.json: the cuts, then bytes as characters."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    cuts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in splitting.patterns
    ]
    if splitting.single_digits:
        cuts.append({"type": "Digits", "individual_digits": True})
    if not splitting.patterns:
        byte_level["use_regex"] = True
    return {"type": "Sequence", "pretokenizers": [*cuts, byte_level]} if cuts else byte_level

"""How byte-level tokenizers cut text into words before they merge, by the names that GGUF files use. Pure.

GGUF files name the tokenizer (`tokenizer.ggml.pre`) instead of holding its rules, so the rules of each known one are
here. An unknown name is refused: other rules would give other tokens for some texts, without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from exo_mesh.weights.splitting_patterns import DEEPSEEK3, GPT4O, LLAMA3, QWEN2, QWEN35, TEKKEN


class Splitting(msgspec.Struct, frozen=True):
    """The rules of one name. patterns: regular expressions, applied one after the other; empty for GPT-2's own.
    single_digits: every digit is a word. whole_words: a word that is a token is not merged. nfc: the text is
    normalised first. begins: whether a text begins with the first token if the file does not say."""

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    begins: bool = False


_GPT2 = Splitting()
_OF_LLAMA3 = Splitting((LLAMA3,), whole_words=True, begins=True)
_LIKE_LLAMA3 = Splitting((LLAMA3,))
_OF_QWEN2 = Splitting((QWEN2,), nfc=True)
_DIGITS = Splitting(single_digits=True)
_OF_GPT4O = Splitting((GPT4O,))
_OF_DEEPSEEK3 = Splitting(DEEPSEEK3)

SPLITTINGS: Mapping[str, Splitting] = {
    "gpt-2": _GPT2, "phi-2": _GPT2, "mpt": _GPT2, "olmo": _GPT2, "jina-es": _GPT2, "jina-de": _GPT2,
    "gigachat": _GPT2, "jais": _GPT2, "trillion": _GPT2, "a.x-4.0": _GPT2, "mellum": _GPT2, "granite-docling": _GPT2,
    "exaone4": _GPT2,
    "llama3": _OF_LLAMA3, "llama-v3": _OF_LLAMA3, "llama-bpe": _OF_LLAMA3, "falcon3": _OF_LLAMA3,
    "falcon-h1": _OF_LLAMA3, "lfm2": _OF_LLAMA3, "pixtral": _OF_LLAMA3, "midm-2.0": _OF_LLAMA3,
    "dbrx": _LIKE_LLAMA3, "smaug-bpe": _LIKE_LLAMA3, "glm4": _LIKE_LLAMA3, "chatglm-bpe": _LIKE_LLAMA3,
    "qwen2": _OF_QWEN2, "stablelm2": _OF_QWEN2, "hunyuan": Splitting((QWEN2,)),
    "deepseek-r1-qwen": Splitting((QWEN2,)), "qwen35": Splitting((QWEN35,), nfc=True),
    "kormo": Splitting((QWEN2,)), "megrez": Splitting((QWEN2,)), "bailingmoe": Splitting((QWEN2,)),
    "bailingmoe2": Splitting((QWEN2,)), "llada-moe": Splitting((QWEN2,)), "grok-2": Splitting((QWEN2,)),
    "solar-open": Splitting((QWEN2,)),
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "codeshell": _DIGITS, "command-r": _DIGITS,
    "exaone": _DIGITS, "minerva-7b": _DIGITS,
    "gpt-4o": _OF_GPT4O, "llama4": _OF_GPT4O, "kanana2": _OF_GPT4O, "minimax-m2": _OF_GPT4O,
    "tekken": Splitting((TEKKEN,), whole_words=True, begins=True),
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

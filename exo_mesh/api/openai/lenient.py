"""Fields of other servers and clients that change nothing at certain values: those values are accepted.

A field that would change the answer is honoured or refused: a listed field with another value is a 400 naming it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from exo_mesh.errors import InputError

MAX_SHOWN = 60

ANY: tuple[Any, ...] = ()
"""Labels, hints about speed, and settings of something that another field turns on: no value changes the answer."""

OPENAI: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "prediction": ANY,
    "prompt_cache_retention": ANY,
    "functions": ([],),
    "function_call": ("none", "auto"),
}

VLLM_AND_SGLANG: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": ANY,
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mm_processor_kwargs": ({},),
    "no_stop_trim": (False,),
    "request_id": ANY,
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "rid": ANY,
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}

LLAMA_CPP_AND_OLLAMA: Mapping[str, tuple[Any, ...]] = {
    "cache_prompt": ANY,
    "dry_allowed_length": ANY,
    "dry_base": ANY,
    "dry_multiplier": (0,),
    "dry_penalty_last_n": ANY,
    "dry_sequence_breakers": ANY,
    "dynatemp_exponent": ANY,
    "dynatemp_range": (0,),
    "id_slot": (-1,),
    "keep_alive": ANY,
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_eta": ANY,
    "mirostat_tau": ANY,
    "n_keep": (0, -1),
    "n_predict": (-1,),
    "n_probs": (0,),
    "options": ({},),
    "post_sampling_probs": (False,),
    "repeat_last_n": (-1,),
    "response_fields": ([],),
    "return_tokens": (False,),
    "t_max_predict_ms": (0,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    "xtc_threshold": ANY,
}

CLIENTS: Mapping[str, tuple[Any, ...]] = {
    "chat_id": ANY,
    "session_id": ANY,
    "extra_body": ({},),
    "safe_prompt": (False,),
}

NEUTRAL: Mapping[str, tuple[Any, ...]] = {**OPENAI, **VLLM_AND_SGLANG, **LLAMA_CPP_AND_OLLAMA, **CLIENTS}
"""The values of each field that do nothing; null does nothing anywhere."""


def without_neutral_fields(body: bytes, known: Collection[str]) -> bytes:
    """The JSON object `body` without fields of NEUTRAL that are not `known` to its route.

    Raises InputError for one with another value, and what msgspec raises for malformed JSON.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name in [name for name in fields if name in NEUTRAL and name not in known]:
        raw, allowed = fields.pop(name), NEUTRAL[name]
        if allowed is not ANY:
            refuse_unless(name, msgspec.json.decode(raw), allowed)
    return msgspec.json.encode(fields)


def refuse_unless(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raises InputError if a field has a value that is neither null nor allowed."""
    if value is not None and not any(_is_same(value, choice) for choice in allowed):
        choices = " or ".join(show_json(choice) for choice in allowed)
        raise InputError(f"{name} is {show_json(value)}, which is not supported yet; it may be {choices}", param=name)


def show_json(value: Any) -> str:
    """The value as the caller wrote it, but never more than a line of it."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = json.dumps(value[: MAX_SHOWN + 1] if isinstance(value, str) else value, ensure_ascii=False)
    except RecursionError:
        text = " " * (MAX_SHOWN + 1)
    if len(text) <= MAX_SHOWN:
        return text
    if isinstance(value, list):
        return f"a list of {len(value)} items"
    return "an object" if isinstance(value, dict) else text[: MAX_SHOWN - 3] + "..."


def _is_same(value: Any, choice: Any) -> bool:
    """JSON has one kind of number, and true is none."""
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)

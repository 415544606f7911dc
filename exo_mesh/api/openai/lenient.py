"""Accepts fields of other servers and clients at values that change nothing.

A field that would change the answer is honoured or refused: a listed field with another value gets a 400 that names it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from exo_mesh.errors import InputError

MAX_SHOWN = 60

ANY: tuple[Any, ...] = ()
"""For fields whose value never changes the answer: labels, hints about speed, and settings of a feature that another
field turns on."""

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

OPENROUTER_AND_GROQ: Mapping[str, tuple[Any, ...]] = {
    "include_reasoning": (True,),
    "plugins": ([],),
    "provider": ANY,  # chooses among providers; the mesh is the only one here
    "reasoning_format": ("auto", "deepseek", "parsed"),
    "route": ("fallback",),
    "transforms": ([],),
}

CLIENTS: Mapping[str, tuple[Any, ...]] = {
    "chat_id": ANY,
    "draft_model": ANY,
    "session_id": ANY,
    "extra_body": ({},),
    "parse_tool_calls": (True,),
    "safe_prompt": (False,),
    "tool_stream": ANY,
}

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **OPENAI,
    **VLLM_AND_SGLANG,
    **LLAMA_CPP_AND_OLLAMA,
    **OPENROUTER_AND_GROQ,
    **CLIENTS,
}
"""For each field the values that have no effect; null never has an effect."""

IN_MESSAGES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("id", "message_id", "messageId", "parent_id", "index", "agent", "model", "provider"), ANY),
    **dict.fromkeys(("created", "created_at", "createdAt", "timestamp", "date", "cycle", "opts", "metadata"), ANY),
    **dict.fromkeys(("usage", "status", "finish_reason", "logprobs", "provider_specific_fields"), ANY),
    # other servers send these together with reasoning whose text is in reasoning or reasoning_content
    **dict.fromkeys(("reasoning_details", "reasoning_opaque", "thinking_blocks"), ANY),
    **dict.fromkeys(("images", "files", "attachments"), ([],)),
    **dict.fromkeys(("prefix", "partial"), (False,)),
}
"""The same for fields of messages: applications keep their own notes in the messages that they send."""


def without_neutral_fields(body: bytes, known: Collection[str], known_in_messages: Collection[str] = ()) -> bytes:
    """Remove the fields of NEUTRAL that the route does not know from the JSON object `body` and from its messages.

    Raises InputError for such a field with another value, and msgspec's errors for malformed JSON.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    _drop(fields, NEUTRAL, known, "")
    if "messages" in known and (messages := fields.get("messages")) is not None:
        fields["messages"] = _without_notes(messages, known_in_messages)
    return msgspec.json.encode(fields)


def _without_notes(messages: msgspec.Raw, known: Collection[str]) -> msgspec.Raw:
    """The messages without neutral fields. Anything but a list of objects stays unchanged, and the struct refuses
    it."""
    try:
        turns = msgspec.json.decode(messages, type=list[dict[str, msgspec.Raw]])
    except msgspec.ValidationError:
        return messages
    for index, turn in enumerate(turns):
        _drop(turn, IN_MESSAGES, known, f"messages[{index}].")
    return msgspec.Raw(msgspec.json.encode(turns))


def _drop(
    fields: dict[str, msgspec.Raw], neutral: Mapping[str, tuple[Any, ...]], known: Collection[str], where: str
) -> None:
    for name in [name for name in fields if name in neutral and name not in known]:
        raw, allowed = fields.pop(name), neutral[name]
        if allowed is not ANY:
            refuse_unless(where + name, msgspec.json.decode(raw), allowed)


def refuse_unless(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raises InputError if a field has a value that is neither null nor allowed."""
    if value is not None and not any(_is_same(value, choice) for choice in allowed):
        choices = " or ".join(show_json(choice) for choice in allowed)
        raise InputError(f"{name} is {show_json(value)}, which is not supported yet; it must be {choices}", param=name)


def show_json(value: Any) -> str:
    """The value as JSON, shortened to at most about one line."""
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
    """Whether two JSON values are equal: 1 equals 1.0, but true does not equal 1."""
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)

"""The fields of other servers and clients that OpenAI's routes accept at values that change nothing."""

from __future__ import annotations

from exo_mesh.api.core.neutral_fields import ANY, ONLY_NULL, NeutralTable

OPENAI: NeutralTable = {
    "modalities": (["text"],),
    "prompt_cache_retention": ANY,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": ONLY_NULL,
}

VLLM_AND_SGLANG: NeutralTable = {
    "add_special_tokens": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
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

LLAMA_CPP_AND_OLLAMA: NeutralTable = {
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

OPENROUTER_AND_GROQ: NeutralTable = {
    "include_reasoning": (True,),
    "plugins": ([],),
    "provider": ANY,  # chooses among providers; the mesh is the only one here
    "reasoning_format": ("auto", "deepseek", "parsed"),
    "route": ("fallback",),
    "transforms": ([],),
}

CLIENTS: NeutralTable = {
    "chat_id": ANY,
    "draft_model": ANY,
    "session_id": ANY,
    "extra_body": ({},),
    "parse_tool_calls": (True,),
    "safe_prompt": (False,),
    "tool_stream": ANY,
}

NEUTRAL: NeutralTable = {
    **OPENAI,
    **VLLM_AND_SGLANG,
    **LLAMA_CPP_AND_OLLAMA,
    **OPENROUTER_AND_GROQ,
    **CLIENTS,
}
"""All fields of requests that may have no effect."""

IN_MESSAGES: NeutralTable = {
    **dict.fromkeys(("id", "message_id", "messageId", "parent_id", "index", "agent", "model", "provider"), ANY),
    **dict.fromkeys(("created", "created_at", "createdAt", "timestamp", "date", "cycle", "opts", "metadata"), ANY),
    **dict.fromkeys(("usage", "status", "finish_reason", "logprobs", "provider_specific_fields"), ANY),
    # other servers send these together with reasoning whose text is in reasoning or reasoning_content
    **dict.fromkeys(("reasoning_details", "reasoning_opaque", "thinking_blocks"), ANY),
    **dict.fromkeys(("images", "files", "attachments"), ([],)),
    **dict.fromkeys(("prefix", "partial"), (False,)),
}
"""The same for fields of messages: applications keep their own notes in the messages that they send."""

"""The fields that the routes of responses accept at values that change nothing. Pure."""

from __future__ import annotations

from exo_mesh.api.core.neutral_fields import ANY, NeutralTable

NEUTRAL: NeutralTable = {
    "background": (False,),
    "background_options": ANY,  # of background, which must be false
    "client_metadata": ANY,  # labels of Codex
    "context_management": ([],),
    "image": ANY,  # about images, which are refused
    "max_tool_calls": ANY,  # counts calls of hosted tools, of which there are none
    "prompt_cache_options": ANY,
    "prompt_cache_retention": ANY,
    "n": (1,),
    "logit_bias": ({},),
    "api_key": ANY,  # gateways copy settings of their own into the body
    "extra_headers": ANY,
    "extra_query": ANY,
    "timeout": ANY,
}
"""Fields of requests that may have no effect."""

COUNTING: NeutralTable = dict.fromkeys(
    (
        "cache",
        "frequency_penalty",
        "include",
        "keep_alive",
        "max_output_tokens",
        "metadata",
        "min_p",
        "presence_penalty",
        "prompt_cache_key",
        "repetition_penalty",
        "safety_identifier",
        "seed",
        "service_tier",
        "stop",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "top_k",
        "top_logprobs",
        "top_p",
        "ttl",
        "user",
    ),
    ANY,
)
"""Fields of responses that do not change the number of tokens of their input."""

"""The fields that Anthropic's routes accept at values that change nothing. Pure."""

from __future__ import annotations

from exo_mesh.api.core.neutral_fields import ANY, ONLY_NULL, NeutralTable

NEUTRAL: NeutralTable = {
    "anthropic_beta": ANY,  # headers of Anthropic's API that gateways put into the body
    "anthropic_version": ANY,
    "betas": ANY,
    "billing_policy": ANY,
    "diagnostics": ANY,  # asks why a prompt was not found in a cache; the reply says nothing of it
    "compaction": ONLY_NULL,
    "fallbacks": ([],),
    "inference_geo": ("global",),
    "mcp_servers": ([],),
    "speed": ANY,
}
"""Fields of requests that may have no effect."""

COUNTING: NeutralTable = dict.fromkeys(
    ("max_tokens", "metadata", "service_tier", "stop_sequences", "stream", "temperature", "top_k", "top_p"), ANY
)
"""Fields of messages that do not change the number of their tokens."""

IN_MESSAGES: NeutralTable = {
    **dict.fromkeys(("id", "type", "model", "stop_reason", "stop_sequence", "stop_details", "usage"), ANY),
    **dict.fromkeys(("container", "context_management", "diagnostics", "parsed_output"), ANY),
    **dict.fromkeys(("created", "created_at", "timestamp", "metadata"), ANY),
}
"""The same for fields of messages: clients send replies back unchanged, and applications add notes of their own."""

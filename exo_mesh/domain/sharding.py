"""What one rank of a tensor group holds of a model. Pure."""

from __future__ import annotations

from dataclasses import replace

from exo_mesh.domain.model import ModelCard

WHOLE_KV = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "glm4_moe_lite", "glm_moe_dsa", "kimi_k25",
        "kimi_k3", "kimi_linear", "longcat_flash", "longcat_flash_ngram", "minicpm3", "mistral4", "qwen3_5",
        "qwen3_5_moe", "youtu_llm",
    }
)  # fmt: skip
"""Architectures of which every rank may keep all of the KV: one latent per token serves all attention heads, or KV
heads are repeated where there are fewer than ranks."""


def sharded(card: ModelCard, size: int) -> ModelCard:
    """The model as one of `size` ranks holds it: its share of every layer, and all of embedding and head.

    What small tensors of a layer every rank keeps (norms, routers) is far less than the engine's own overhead.
    """
    if size == 1:
        return card
    kv = 1 if card.architecture in WHOLE_KV else size
    return replace(
        card,
        layer_bytes=tuple(_part(held, size) for held in card.layer_bytes),
        kv_bytes_per_token=_part(card.kv_bytes_per_token, kv),
        kv_layer_bytes=tuple(_part(held, kv) for held in card.kv_layer_bytes),
        kv_fixed_bytes=tuple(_part(held, kv) for held in card.kv_fixed_bytes),
    )


def _part(num_bytes: int, size: int) -> int:
    return -(-num_bytes // size)

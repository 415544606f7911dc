"""The model families that this engine computes, and how they differ. Without NumPy, because a node asks for them."""

from __future__ import annotations

from typing import Literal

import msgspec

Presence = Literal["always", "never", "as configured"]


class Family(msgspec.Struct, frozen=True):
    """The differences of one `model_type` from the others; the forward pass is the same for all.

    bias: of the q, k and v projections. output_bias: of the o projection. mlp_bias: of all three of the MLP. window:
    how `sliding_window` works. theta, tied: transformers' defaults if the config has no value.
    """

    bias: Presence = "never"
    output_bias: Presence = "never"
    mlp_bias: Presence = "never"
    qk_norm: bool = False
    window: Literal["none", "all layers", "some layers"] = "none"
    skips_rope: bool = False
    theta: float = 10000.0


FAMILIES = {
    "llama": Family(bias="as configured", output_bias="as configured", mlp_bias="as configured"),
    "mistral": Family(window="all layers"),
    "qwen2": Family(bias="always", window="some layers"),
    "qwen3": Family(bias="as configured", output_bias="as configured", qk_norm=True, window="some layers"),
    "smollm3": Family(
        bias="as configured",
        output_bias="as configured",
        mlp_bias="as configured",
        window="some layers",
        skips_rope=True,
        theta=2e6,
    ),
}

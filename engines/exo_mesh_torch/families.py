"""The families of models whose images this engine takes."""

from __future__ import annotations

VISION_FAMILIES = frozenset({"gemma3", "llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"})
"""Values of `model_type` of the models whose vision tower and text layers this engine runs."""

TEXT_OF_FAMILIES = frozenset({"glm5_next", "hy_v4_vl", "inkling2", "inkling2_loop", "lfm3_vl"})
"""Values of `model_type` of models of several kinds of input of which this engine runs the text layers only."""

GRID_POSITIONS = frozenset({"qwen2_5_vl", "qwen2_vl", "qwen3_vl"})
"""Model types that count the positions of image tokens by row and column."""

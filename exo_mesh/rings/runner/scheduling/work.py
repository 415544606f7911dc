"""The rows and token ids of one frame: what the scheduler decides, and the driver sends."""

from __future__ import annotations

from typing import NamedTuple

from exo_mesh.domain.frame import Row


class Work(NamedTuple):
    """Rows of one frame and their token ids: decode rows of one batch, or one chunk of prefill, which may hold the end
    of one prompt and the whole of others. upto: only stages before this one compute it; 0 means all. is_scoring: of a
    chunk, whether logits of whole parts of prompts are wanted."""

    rows: tuple[Row, ...]
    token_ids: tuple[int, ...]
    upto: int = 0
    is_scoring: bool = False
    is_prefill: bool = False

"""The rows and token ids of one frame: what the scheduler decides, and the driver sends."""

from __future__ import annotations

from typing import NamedTuple

from exo_mesh.domain.frame import Row


class Work(NamedTuple):
    """Rows of one frame and their token ids: decode rows of one batch, or one chunk of prefill, which may hold the end
    of one prompt and the whole of others. upto: only stages before this one compute it; 0 means all. is_scoring: it is
    prefill although logits of its rows are wanted."""

    rows: tuple[Row, ...]
    token_ids: tuple[int, ...]
    upto: int = 0
    is_scoring: bool = False

    @property
    def is_prefill(self) -> bool:
        return bool(self.rows) and (self.is_scoring or not self.rows[0].num_logits)

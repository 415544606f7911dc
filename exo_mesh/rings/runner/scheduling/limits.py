"""The limits of a scheduler, and their defaults."""

from __future__ import annotations

import msgspec

from exo_mesh.domain.footprint import MOST_CHUNK_TOKENS, MOST_SEQUENCES

PREFILL_CHUNK = MOST_CHUNK_TOKENS
"""Most tokens of a prefill frame, unless a setting asks for less."""

PREFILL_BUDGET_S = 0.25
"""Longest delay that a chunk's lap may cause for the streams that run beside it."""

PREFILL_ALONE_S = 1.0
"""Longest lap of a chunk while nothing streams: a new request waits for the chunks that are on their way."""


class SchedulerLimits(msgspec.Struct, frozen=True):
    """num_stages: of the ring. prefill_chunk: most tokens of a prefill frame; prefill_budget_s: longest lap of a chunk
    beside running streams, prefill_alone_s: where there are none. max_rows: decode rows of one frame. max_running,
    max_waiting: requests. max_tokens: positions that all running sequences may hold together as planned, except that
    one alone may hold more."""

    num_stages: int
    prefill_chunk: int = PREFILL_CHUNK
    prefill_budget_s: float = PREFILL_BUDGET_S
    prefill_alone_s: float = PREFILL_ALONE_S
    max_rows: int = 32
    max_running: int = MOST_SEQUENCES
    max_waiting: int = 32
    max_tokens: int = 2**31

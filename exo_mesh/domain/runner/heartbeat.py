"""The heartbeat of a runner: its counters, twice a second. Pure."""

from __future__ import annotations

import msgspec

from exo_mesh.base.telemetry.durations import DurationCounts
from exo_mesh.domain.footprint import LibraryMemory
from exo_mesh.domain.runner.prefix_figures import PrefixFigures

NO_DURATIONS = DurationCounts()


DRAFT_POSITIONS = (1, 2, 4, 8, 16)
"""Drafts are counted by position: 1, 2, 3 to 4, 5 to 8, 9 to 16, and from 17 on."""


class Heartbeat(msgspec.Struct):
    """The counters of a runner; runner.proto explains them. The parts of a runner fill it one after another; nobody
    changes it after that."""

    progress: int = 0
    frames_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0
    sequences: int = 0
    memory_bytes: int = 0
    queued: int = 0
    running: int = 0
    tokens: int = 0
    linked: bool = False
    busy_s: float = 0.0
    lap_p50_s: float = 0.0
    lap_p99_s: float = 0.0
    laps: int = 0
    parked: int = 0
    kv_tokens: int = 0
    kv_pool_tokens: int = 0
    evictions: int = 0
    oldest_wait_s: float = 0.0
    laps_saved: int = 0
    drafts_accepted: tuple[int, ...] = ()
    drafts_rejected: tuple[int, ...] = ()
    computing_tokens: int = 0
    computing_prefill: bool = False
    expected_s: float = 0.0
    prefill_frames: int = 0
    decode_frames: int = 0
    shared_tokens: int = 0
    prompts: int = 0
    laps_took: DurationCounts = NO_DURATIONS
    hops_took: DurationCounts = NO_DURATIONS
    queue_waits: DurationCounts = NO_DURATIONS
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    hop_took: DurationCounts = NO_DURATIONS
    all_reduce_s: float = 0.0
    library: LibraryMemory | None = None
    slots: int = 0
    is_idle: bool = False
    hop_rests: bool = False
    step_all_reduces: int = 0
    prefix: PrefixFigures = msgspec.field(default_factory=PrefixFigures)

    @property
    def kv_free_tokens(self) -> int:
        """Positions of the pool that neither running requests nor the prefix cache hold."""
        return max(0, self.kv_pool_tokens - self.kv_tokens - self.prefix.kept_tokens)

    @property
    def step_all_reduce_s(self) -> float:
        """Time of all all-reduces of one decode step."""
        return self.all_reduce_s * self.step_all_reduces

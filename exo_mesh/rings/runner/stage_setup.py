"""What a worker starts with: its plan, its place in the plan, its limits, and perhaps an engine imported before."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from exo_mesh.domain.footprint import MOST_SEQUENCES
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.engine.contract import MachineMemory, StageEngine
from exo_mesh.rings.prefix_disk.folder import FileLimits
from exo_mesh.rings.runner.scheduling.limits import PREFILL_CHUNK


@dataclass(frozen=True, slots=True)
class DiskSetup:
    """Where a stage writes KV. secret: the key that seals the files; empty in an open mesh."""

    root: Path
    limits: FileLimits
    secret: bytes = field(default=b"", repr=False)


class StageSetup(msgspec.Struct, frozen=True):
    """The plan of a worker and its place in it. rank: set in a tensor group. memory: of the machine, just before the
    load. max_queued, max_running, prefill_chunk: limits of the scheduler, if this is the last stage.

    prefix_bytes: limit of the prefix cache on this stage; 0: it is off, None: what running sequences leave of the KV
    pool. disk: where it writes KV for later prompts; None: nowhere. warms_up: whether the engine computes something
    after its load that a first request would wait for. draft: where drafts come from, if this is the last stage; see
    drafting/sources.py.
    """

    plan: Plan
    index: int
    model_dir: Path
    options: dict[str, str]
    max_queued: int
    rank: RankWiring | None = None
    memory: MachineMemory | None = None
    max_running: int = MOST_SEQUENCES
    prefill_chunk: int = PREFILL_CHUNK
    prefix_bytes: int | None = None
    disk: DiskSetup | None = None
    warms_up: bool = True
    draft: str = "off"

    @property
    def num_stages(self) -> int:
        return len(self.plan.stages)

    @property
    def has_group(self) -> bool:
        """Whether some stage of the ring is a tensor group. Its ranks tell their leader with each frame how much memory
        they have, and none can ask for a frame."""
        return any(stage.group is not None for stage in self.plan.stages)

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def before(self) -> int:
        """Index of the stage that sends the frames: the previous stage of the ring, or, for a rank that follows, its
        own stage."""
        return self.index if self.follows else (self.index - 1) % self.num_stages

    @property
    def follows(self) -> bool:
        """Whether this is a rank that a leader drives: it computes the frames that it gets, and passes nothing on."""
        return self.rank is not None and not self.rank.is_leader


class PreparedEngine(msgspec.Struct, frozen=True):
    """An engine whose library was imported before there was a stage for it."""

    name: str
    engine: StageEngine

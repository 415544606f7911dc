"""What a runner reports to its node. Pure."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from exo_mesh.domain.fields import Flat
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.stage import LoadOutcome, StageLoading


class EnginePrepared(msgspec.Struct, frozen=True):
    """The process has imported the library of an engine. memory_bytes: of the process."""

    import_s: float
    memory_bytes: int


class RunnerListening(msgspec.Struct, frozen=True):
    """The runner has loaded, and listens for frames at this port."""

    port: int
    pid: int


class RunnerReady(msgspec.Struct, frozen=True):
    """The runner works for its plan. rolls_back: its KV can be truncated to any position."""

    loaded: Annotated[LoadOutcome, Flat()] = LoadOutcome()
    rolls_back: bool = False


class PlanChanged(msgspec.Struct, frozen=True):
    """The plan of this ballot is in force in the runner. resumed: running requests that continue in a driver."""

    ballot: Ballot
    resumed: int


class HopBroke(msgspec.Struct, frozen=True):
    """The next stage cannot be reached, or cannot read the messages. The runner waits a while for another plan."""

    message: str


class RunnerFailed(msgspec.Struct, frozen=True):
    """The last report: why the process ends."""

    code: str
    message: str


FromRunner: TypeAlias = (
    EnginePrepared | StageLoading | RunnerListening | RunnerReady | Heartbeat | PlanChanged | HopBroke | RunnerFailed
)

"""The progress of each stage of an instance: planned, downloading, loading, warming, ready. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from exo_mesh.domain.reports import InstanceReport, InstanceStage
from exo_mesh.domain.view import InstanceState


class LoadPhase(StrEnum):
    """The phases in order. warming: the weights are loaded; the stage computes its first passes, and is linked to the
    others and tested."""

    PLANNED = "planned"
    DOWNLOADING = "downloading"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"


class StagePhase(msgspec.Struct, frozen=True):
    """A phase with its progress. done, total: bytes while downloading, parts of the weights while loading; 0 if
    unknown."""

    phase: LoadPhase
    done: int = 0
    total: int = 0

    @property
    def text(self) -> str:
        """The phase and its progress, for people."""
        if self.phase is LoadPhase.LOADING and self.total:
            return f"{self.phase} {self.done}/{self.total}"
        if self.phase is LoadPhase.DOWNLOADING and self.total:
            return f"{self.phase} {100 * self.done // self.total} %"
        return str(self.phase)


def of_rank(
    fetching: tuple[int, int] | None, loading: tuple[int, int] | None, *, is_loaded: bool, is_ready: bool
) -> StagePhase:
    """The phase of one rank, from its reports."""
    if is_ready:
        return StagePhase(LoadPhase.READY)
    if is_loaded or (loading is not None and 0 < loading[1] <= loading[0]):
        return StagePhase(LoadPhase.WARMING)
    if fetching is not None and fetching[0] < fetching[1]:
        return StagePhase(LoadPhase.DOWNLOADING, *fetching)
    return StagePhase(LoadPhase.PLANNED) if loading is None else StagePhase(LoadPhase.LOADING, *loading)


def of_stage(ranks: Sequence[StagePhase]) -> StagePhase:
    """The phase of a stage: its slowest rank's."""
    return min(ranks, key=lambda rank: (list(LoadPhase).index(rank.phase), rank.done / (rank.total or 1)))


def note_phases(instance: InstanceReport, known: Callable[[str], Sequence[StagePhase]]) -> None:
    """Sets the phase and the progress of each stage of a described instance.

    known: returns the phases of an instance that this node brings up, by id, and () for other instances, whose phases
    come from the view.
    """
    own = known(instance.id) if instance.state is InstanceState.LOADING else ()
    phases = own or [_from_view(instance.state, stage) for stage in instance.stages]
    for stage, phase in zip(instance.stages, phases, strict=True):
        stage.phase, stage.progress = str(phase.phase), phase.text


def _from_view(state: InstanceState, stage: InstanceStage) -> StagePhase:
    active = [one for one in stage.downloads or () if one.state.is_active]
    if state is InstanceState.LOADING and active:
        done, total = sum(one.done_bytes for one in active), sum(one.total_bytes for one in active)
        return StagePhase(LoadPhase.DOWNLOADING, done, total)
    known = {InstanceState.READY: LoadPhase.READY, InstanceState.LOADING: LoadPhase.LOADING}
    return StagePhase(known.get(state, LoadPhase.PLANNED))

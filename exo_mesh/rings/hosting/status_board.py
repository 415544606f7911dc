"""Publishes the known status of one stage to any number of watchers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec

from exo_mesh.base.tasks import ChangeSignal
from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.stage import StageFailed, StageReady, StageUpdate

_NEVER_S = 3600.0
_Kind = TypeVar("_Kind", bound=StageUpdate)


class StageBeat(msgspec.Struct, frozen=True):
    """The last heartbeat of a stage that runs here; is_driver: it is the last stage of its ring. rank, num_ranks: of
    its tensor group; 0 and 1 without one. kv_heads: of this rank's KV; 0 if unknown."""

    instance_id: str
    index: int
    is_driver: bool
    beat: Heartbeat
    rank: int = 0
    num_ranks: int = 1
    kv_heads: int = 0


class StatusBoard:
    """The latest update of each kind. StageFailed is final."""

    watchers = 0
    """Number of current watchers."""

    def __init__(self) -> None:
        self._latest: dict[type[Any], tuple[int, StageUpdate]] = {}
        self._count = 0
        self._changed = ChangeSignal()

    def _last(self, kind: type[_Kind]) -> _Kind | None:
        found = self._latest.get(kind)
        return found[1] if found is not None else None  # type: ignore[return-value]

    @property
    def failed(self) -> StageFailed | None:
        return self._last(StageFailed)

    @property
    def ready(self) -> bool:
        return StageReady in self._latest

    @property
    def load_s(self) -> float:
        """Seconds that loading took; 0 before it is ready."""
        ready = self._last(StageReady)
        return ready.loaded.load_s if ready is not None else 0.0

    @property
    def kv_heads(self) -> int:
        """Heads of keys in the KV of this rank of a tensor group; 0 if unknown or no group."""
        ready = self._last(StageReady)
        return ready.loaded.group.check.kv_heads if ready is not None and ready.loaded.group is not None else 0

    def publish(self, update: StageUpdate) -> None:
        """Publish an update to all watchers. An update after StageFailed is dropped."""
        if self.failed is None:
            self._count += 1
            self._latest.pop(type(update), None)  # keep the order of the last reports
            self._latest[type(update)] = (self._count, update)
            self._changed.beat()

    def fail(self, code: str, message: str) -> None:
        self.publish(StageFailed(code, message))

    async def watch(self) -> AsyncIterator[StageUpdate]:
        """Yield the known updates, then new ones, until the stage has failed; stale loading reports are skipped."""
        seen = 0
        self.watchers += 1
        try:
            while True:
                news = [(count, update) for count, update in self._latest.values() if count > seen]
                for count, update in news:
                    seen = count
                    yield update
                    if isinstance(update, StageFailed):
                        return
                if not news:
                    await self._changed.wait(_NEVER_S)
        finally:
            self.watchers -= 1

"""Publishes the known status of one stage to any number of watchers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from exo_mesh.base.tasks import ChangeSignal
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto.runner_pb2 import Heartbeat

_NEVER_S = 3600.0


@dataclass(frozen=True, slots=True)
class StageBeat:
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
    """The latest status of each kind ("listening", "loading", "ready", "failed"). "failed" is final."""

    watchers = 0
    """Number of current watchers."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[int, pb.StageStatus]] = {}
        self._count = 0
        self._changed = ChangeSignal()

    @property
    def failed(self) -> pb.StageFailed | None:
        entry = self._latest.get("failed")
        return entry[1].failed if entry else None

    @property
    def ready(self) -> bool:
        return "ready" in self._latest

    @property
    def load_s(self) -> float:
        """Seconds that loading took; 0 before it is ready."""
        entry = self._latest.get("ready")
        return entry[1].ready.load_s if entry else 0.0

    @property
    def all_reduce_s(self) -> float:
        """Seconds of an all-reduce of a few bytes, as measured by the tensor group that this stage leads; 0 if it leads
        none."""
        entry = self._latest.get("ready")
        return entry[1].ready.group.all_reduce_s if entry else 0.0

    @property
    def kv_heads(self) -> int:
        """Heads of keys in the KV of this rank of a tensor group; 0 if unknown or no group."""
        entry = self._latest.get("ready")
        return entry[1].ready.group.kv_heads if entry else 0

    def publish(self, status: pb.StageStatus) -> None:
        """Publish a status to all watchers. A status after "failed" is dropped."""
        kind = status.WhichOneof("status")
        if kind is not None and self.failed is None:
            self._count += 1
            self._latest.pop(kind, None)  # keep the order of the last reports
            self._latest[kind] = (self._count, status)
            self._changed.beat()

    def fail(self, code: str, message: str) -> None:
        self.publish(pb.StageStatus(failed=pb.StageFailed(code=code, message=message)))

    async def watch(self) -> AsyncIterator[pb.StageStatus]:
        """Yield the known statuses, then new ones, until the stage has failed; stale loading reports are skipped."""
        seen = 0
        self.watchers += 1
        try:
            while True:
                news = [(count, status) for count, status in self._latest.values() if count > seen]
                for count, status in news:
                    seen = count
                    yield status
                    if status.HasField("failed"):
                        return
                if not news:
                    await self._changed.wait(_NEVER_S)
        finally:
            self.watchers -= 1

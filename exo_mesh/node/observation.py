"""What this node can be asked about its work: queues, requests, memory. Plain JSON values, numbers and names only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from exo_mesh.domain.device import Telemetry
from exo_mesh.hosting.status_board import StageBeat
from exo_mesh.machine.pressure import MemoryMonitor
from exo_mesh.proto.runner_pb2 import Heartbeat
from exo_mesh.serving.journal import Journal


class Observation:
    """Looks only; nothing here changes anything. beats: of the stages that run here."""

    def __init__(
        self,
        journal: Journal,
        monitor: MemoryMonitor,
        beats: Callable[[], Iterable[StageBeat]],
        telemetry: Callable[[], Iterable[tuple[str, str, Telemetry]]],
        max_waiting: int,
    ) -> None:
        self._journal = journal
        self._monitor = monitor
        self._beats = beats
        self._telemetry = telemetry
        self._max_waiting = max_waiting

    def queue(self) -> dict[str, Any]:
        """Of the drivers that run here; `entered` are the requests that came in by this node, wherever they run."""
        drivers: list[dict[str, Any]] = [
            {
                "instance": stage.instance_id,
                "waiting": stage.beat.queued,
                "running": stage.beat.running,
                "tokens": stage.beat.tokens,
            }
            for stage in self._beats()
            if stage.is_driver
        ]
        waiting = sum(driver["waiting"] for driver in drivers)
        running = sum(driver["running"] for driver in drivers)
        return {
            "depth": waiting + running,
            "max": self._max_waiting,
            "waiting": waiting,
            "in_progress": running,
            "entered": len(self._journal),
            "instances": drivers,
        }

    def recent_requests(self, most: int) -> list[dict[str, Any]]:
        """How the last requests that entered here have ended, newest first."""
        return [outcome.describe() for outcome in self._journal.history.recent(most)]

    def request_stats(self) -> dict[str, Any]:
        return self._journal.history.stats()

    def memory(self, *, whole_mesh: bool) -> dict[str, Any]:
        """Of this machine; for the whole mesh also the last reading of every peer, which came with its telemetry."""
        stages = [
            {
                "instance": stage.instance_id,
                "stage": stage.index,
                "memory_bytes": stage.beat.memory_bytes,
                "sequences": stage.beat.sequences,
                **(_kv(stage.beat) if stage.is_driver else {}),
            }
            for stage in self._beats()
        ]
        answer: dict[str, Any] = {**self._monitor.describe(), "stages": stages}
        if whole_mesh:
            answer["peers"] = [
                {
                    "id": peer_id,
                    "name": name,
                    "total_bytes": reading.total_bytes,
                    "usable_bytes": reading.usable_bytes,
                    "reserved_bytes": reading.reserved_bytes,
                }
                for peer_id, name, reading in self._telemetry()
            ]
        return answer

    def memory_live(self) -> list[dict[str, float]]:
        """The readings of the last minute and a half, oldest first."""
        return [snapshot.describe() for snapshot in self._monitor.kept]


def _kv(beat: Heartbeat) -> dict[str, int]:
    """What the driver of a ring knows of its KV pool, in positions, which each stage of it has for its own layers."""
    return {"kv_tokens": beat.kv_tokens, "kv_pool_tokens": beat.kv_pool_tokens, "evictions": beat.evictions}

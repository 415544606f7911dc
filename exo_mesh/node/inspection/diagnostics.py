"""Collects diagnostics of this node and its peers for troubleshooting. Numbers and names only, all bounded."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import psutil

from exo_mesh import PROTOCOL_VERSION, __version__
from exo_mesh.domain.reports import HealthReport
from exo_mesh.machine.disk import Disk
from exo_mesh.machine.pressure import MemoryMonitor
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.node.inspection.asking import ask_peers
from exo_mesh.node.inspection.calls import diagnose
from exo_mesh.rings.hosting.flight_recorder import FlightRecorder
from exo_mesh.rings.hosting.status_board import StageBeat
from exo_mesh.rings.serving.journal import Journal

MAX_TIMELINE = 4096
"""Most entries of a merged timeline; the newest ones are kept."""


class Diagnostics:
    """Collects diagnostics. beats: returns the last heartbeats of the stages here. health: the body of GET /health."""

    def __init__(
        self,
        membership: Membership,
        flights: FlightRecorder,
        journal: Journal,
        monitor: MemoryMonitor,
        disk: Disk,
        beats: Callable[[], Sequence[StageBeat]],
        health: Callable[[], HealthReport],
    ) -> None:
        self._membership = membership
        self._flights = flights
        self._journal = journal
        self._monitor = monitor
        self._disk = disk
        self._beats = beats
        self._health = health
        self._started = time.time()

    async def node(self) -> dict[str, Any]:
        """The diagnostics of this node."""
        processes = await asyncio.to_thread(_processes)  # reads the processes of the system: some milliseconds
        own = self._membership.own
        now = time.time()
        return {
            "node_id": own.id,
            "name": own.name,
            "at": round(now, 3),
            "runtime": {
                "version": __version__,
                "protocol": PROTOCOL_VERSION,
                "python": platform.python_version(),
                "system": f"{platform.system()} {platform.release()} {platform.machine()}",
                "pid": os.getpid(),
                "uptime_s": round(now - self._started, 1),
            },
            "resources": {
                "cores": os.cpu_count(),
                "load": [round(load, 2) for load in os.getloadavg()],
                "memory": self._monitor.describe(),
                "disk": {"home": str(self._disk.home), "total_bytes": self._disk.total_bytes,
                         "free_bytes": self._disk.free_bytes, "writes_refused": self._disk.refused},
            },
            "processes": processes,
            "requests": self._journal.describe_live(),
            "stages": [_stage(stage) for stage in self._beats()],
            "runners": self._runners(),
            "health": msgspec.to_builtins(self._health()),
        }  # fmt: skip

    def timeline(self) -> dict[str, Any]:
        """Only the phases of the runners on this node."""
        own = self._membership.own
        return {"node_id": own.id, "name": own.name, "at": round(time.time(), 3), "runners": self._runners()}

    async def of(self, peer: str = "") -> dict[str, Any]:
        """The diagnostics of one node, see Membership.peer_named. Raises MeshErrors."""
        return await diagnose(self._membership.calls, self._membership.peer_named(peer, "id").id)

    async def cluster(self) -> dict[str, Any]:
        """The diagnostics of all nodes that answer, and the list of nodes that do not."""
        answers, unreachable = await self._ask_all(timeline=False)
        return {"nodes": [await self.node(), *answers], "unreachable": unreachable}

    async def cluster_timeline(self) -> dict[str, Any]:
        """The phases of all runners of the mesh, ordered by this node's clock."""
        answers, unreachable = await self._ask_all(timeline=True)
        offsets = {peer.id: peer.clock_offset_s or 0.0 for peer in self._membership.peers}
        entries = [entry for answer in (self.timeline(), *answers) for entry in _entries(answer, offsets)]
        entries.sort(key=lambda entry: entry["at"])
        return {"entries": entries[-MAX_TIMELINE:], "left_out": max(0, len(entries) - MAX_TIMELINE),
                "unreachable": unreachable}  # fmt: skip

    def node_timeline(self) -> list[dict[str, Any]]:
        """The entries of `cluster_timeline` for this node alone."""
        entries = _entries(self.timeline(), {})
        return sorted(entries, key=lambda entry: float(entry["at"]))

    def _runners(self) -> list[dict[str, Any]]:
        return [
            {"runner": log.label, "pid": log.pid, "ended": log.ended, "phases": log.describe()}
            for log in self._flights.logs
        ]

    async def _ask_all(self, *, timeline: bool) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
        answers, unreachable = await ask_peers(
            self._membership, lambda peer: diagnose(self._membership.calls, peer.id, timeline=timeline)
        )
        return [answer for _, answer in answers], unreachable


def _entries(answer: Mapping[str, Any], offsets: Mapping[str, float]) -> list[dict[str, Any]]:
    """The phases of all runners of a node, in times of our clock. Ignores invalid parts of a peer's answer."""
    offset_s = offsets.get(str(answer["node_id"]), 0.0)
    made = []
    for runner in _dicts(answer.get("runners")):
        for phase in _dicts(runner.get("phases")):
            at, until = phase.get("at"), phase.get("until")
            if isinstance(at, int | float) and isinstance(until, int | float):
                times = {"at": round(at - offset_s, 3), "until": round(until - offset_s, 3)}
                whose = {"node": answer["node_id"], "name": answer.get("name"), "runner": runner.get("runner"),
                         "pid": runner.get("pid")}  # fmt: skip
                made.append({**phase, **times, **whose})
    return made


def _dicts(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _stage(stage: StageBeat) -> dict[str, Any]:
    beat = stage.beat
    return {
        "instance": stage.instance_id,
        "stage": stage.index,
        "is_driver": stage.is_driver,
        "progress": beat.progress,
        "computing_tokens": beat.computing_tokens,
        "expected_s": round(beat.expected_s, 4),
        "prefill_frames": beat.prefill_frames,
        "decode_frames": beat.decode_frames,
        "sequences": beat.sequences,
        "waiting": beat.queued,
        "running": beat.running,
        "parked": beat.parked,
        "memory_bytes": beat.memory_bytes,
        "linked": beat.linked,
    }


def _processes() -> list[dict[str, Any]]:
    """The resources of this process and its children. Names only, since arguments would reveal paths and models."""
    own = psutil.Process()
    found = []
    for process in [own, *own.children(recursive=True)][:64]:
        try:
            with process.oneshot():
                times = process.cpu_times()
                found.append(
                    {
                        "pid": process.pid,
                        "name": process.name(),
                        "status": process.status(),
                        "rss_bytes": process.memory_info().rss,
                        "cpu_s": round(times.user + times.system, 2),
                        "threads": process.num_threads(),
                        "fds": process.num_fds() if sys.platform != "win32" else None,
                    }
                )
        except psutil.Error:
            continue  # the process has just ended
    return found

"""Reports the state of the node and of the mesh. Read-only."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from exo_mesh import PROTOCOL_VERSION, __version__
from exo_mesh.base.clock import monotonic
from exo_mesh.base.printable import counted
from exo_mesh.domain.fast_synch import resolve
from exo_mesh.domain.reports import (
    DriverQueue,
    HealthReport,
    QueueReport,
    RunnerReport,
    StateReport,
    TopologyReport,
)
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.machine.disk import Disk
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.node.health import Health
from exo_mesh.node.inspection.describe import (
    describe_beat,
    describe_cables,
    describe_links,
    describe_peer_memory,
    describe_stage_memory,
    describe_telemetry,
    describe_topology,
    describe_view,
)
from exo_mesh.node.inspection.service import InspectionService
from exo_mesh.rings.hosting.wiring import HostingParts
from exo_mesh.rings.placing.instances import Instances
from exo_mesh.rings.serving.answer_stages import AnsweredRequest
from exo_mesh.rings.serving.explanations import Explanation
from exo_mesh.rings.serving.history import RequestOutcome
from exo_mesh.rings.serving.wiring import ServingParts
from exo_mesh.settings.config import Settings

if TYPE_CHECKING:
    from exo_mesh.node.inspection.otlp.exporter import TraceExporter


class Observation:
    """The read-only calls of the API. phase: where the node is between its start and its stop; see Health.describe."""

    def __init__(
        self,
        settings: Settings,
        phase: Callable[[], str],
        membership: Membership,
        hosting: HostingParts,
        instances: Instances,
        serving: ServingParts,
        health: Health,
        disk: Disk,
        exporter: TraceExporter | None,
    ) -> None:
        self._settings = settings
        self._phase = phase
        self._membership = membership
        self._hosting = hosting
        self._host = hosting.host
        self._instances = instances
        self._serving = serving
        self._health = health
        self.inspection = InspectionService(settings, membership, hosting, serving, disk, self.health, exporter)

    def state(self) -> StateReport:
        """`view` (shared by all peers: peers, instances, view_digest), `telemetry` (per peer) and `health`."""
        placed: list[InstanceInfo] = [instance for _, instance in self._instances.all()]
        beats = {one.plan.instance_id: self._host.beat(one.plan.instance_id) for one in placed}
        readings = self._membership.telemetry
        return StateReport(
            node_id=self._membership.own.id,
            view=describe_view(self._membership.view, self._instances.phases),
            telemetry={peer_id: describe_telemetry(reading) for peer_id, reading in readings.items()},
            links=describe_links(self._membership, readings),
            cables=describe_cables(self._membership.view),
            fast_synch=resolve(self._settings.fast_synch, os.environ),
            runner=self.runner(),
            requests_here=self._serving.journal.states(),
            stages_here={name: describe_beat(beat) for name, beat in beats.items() if beat is not None},
            health=self.health(),
        )

    async def view_change(self, timeout_s: float) -> bool:
        """Waits until a peer or instance appears, disappears or changes its state: True; False after timeout_s."""
        before, end = self._gist(), monotonic() + timeout_s
        while (left_s := end - monotonic()) > 0 and await self._membership.changed.wait(left_s):
            if self._gist() != before:
                return True
        return False

    def _gist(self) -> tuple[object, ...]:
        """The parts of the view that people watch live; the digest of the view covers more and costs a millisecond."""
        view = self._membership.view
        placed = tuple((one.plan.instance_id, one.ballot, one.state) for _, one in view.instances())
        return (*(peer.id for peer in view.peers()), *placed)

    def topology(self) -> TopologyReport:
        """The peers, the links, and the ring of each instance, for people and pictures."""
        return describe_topology(self._membership, self._instances)

    def health(self) -> HealthReport:
        """{"status": "ok" | "degraded" | "starting" | "stopping" | …, "level", "reasons": [{"code", "level", "message",
        "remedy"}], "peer_health": [{"id", "name", "level", "reasons"}], "instance_health": likewise, …}"""
        phase = self._phase()
        return self._health.describe("draining" if phase == "ok" and self._host.draining else phase)

    def work(self) -> str:
        """The reason why this machine must not sleep, in words; "" if it works for no request."""
        if requests := len(self._serving.journal):
            return f"it works for {counted(requests, 'request')}"
        return "a stage here works for a request" if self._host.is_in_use() else ""

    def drain_state(self) -> dict[str, Any]:
        """{"draining", "drained", "requests", "sequences"}: requests that entered here, sequences of the stages
        here."""
        requests = len(self._serving.journal)
        sequences = sum(stage.beat.sequences for stage in self._host.beats())
        draining = self._host.draining
        drained = draining and not requests and not sequences
        return {"draining": draining, "drained": drained, "requests": requests, "sequences": sequences}

    def identity(self) -> dict[str, Any]:
        """{"node_id", "name", "incarnation", "version", "protocol", "namespace", "api_url"} of this node."""
        own = self._membership.own
        return {
            "node_id": own.id,
            "name": own.name,
            "incarnation": own.incarnation,
            "version": __version__,
            "protocol": PROTOCOL_VERSION,
            "namespace": own.namespace,
            "api_url": own.api_url,
        }

    def runner(self) -> RunnerReport:
        """{"runner_mode": "subprocess", "runner_status"}; runner_status: "none" without a stage here, "loading",
        "idle", "busy" while a stage holds a sequence, "failed" if nothing runs here and an instance with a stage here
        failed, or "shutting_down" while the node stops."""
        beats, own_id = self._host.beats(), self._membership.own.id
        states = {one.state for _, one in self._instances.all() if own_id in one.plan.member_ids}
        tests = {
            "shutting_down": self._membership.stops.asked.is_set(),
            "busy": any(stage.beat.sequences for stage in beats),
            "loading": InstanceState.LOADING in states,
            "idle": bool(beats),
            "failed": InstanceState.FAILED in states,
        }
        status = next((word for word, holds in tests.items() if holds), "none")
        return RunnerReport("subprocess", status)

    def idle_instances(self) -> list[str]:
        """Ids of instances that failed, or that no request uses or waits for, as far as this node knows."""
        used = Counter(self._serving.journal.outstanding())
        for reading in self._membership.telemetry.values():
            used.update(reading.outstanding)
        placed = {one.plan.instance_id: one.state for _, one in self._instances.all()}
        return [
            name
            for name, state in placed.items()
            if state is InstanceState.FAILED or (state is InstanceState.READY and not used[name])
        ]

    # requests

    def queue(self) -> QueueReport:
        drivers = [
            DriverQueue(stage.instance_id, stage.beat.queued, stage.beat.running, stage.beat.tokens)
            for stage in self._host.beats()
            if stage.is_driver
        ]
        waiting, running = sum(one.waiting for one in drivers), sum(one.running for one in drivers)
        return QueueReport(
            depth=waiting + running,
            max=self._settings.max_queued,
            waiting=waiting,
            in_progress=running,
            entered=len(self._serving.journal),
            instances=drivers,
        )

    def recent_requests(self, most: int, key_id: str | None = None) -> list[dict[str, Any]]:
        """The outcomes of requests that entered here, newest first, each with the stages that computed the last part of
        its answer, as far as they are known. key_id: only requests with this API key, "" for requests without a key,
        None for all."""
        recent = self._serving.journal.history.recent(most, key_id)
        return [outcome.describe() | {"stages": self._stages_of(outcome)} for outcome in recent]

    def _stages_of(self, outcome: RequestOutcome) -> list[dict[str, Any]]:
        found = self.answered(outcome.request_id, outcome.key_id)
        legs = found.legs.describe() if found is not None else []
        return [{"names": one["names"], "layers": one["layers"]} for one in legs[-1]["stages"]] if legs else []

    def explanation(self, request_id: str, key_id: str | None = None) -> Explanation | None:
        """Where the prompt of a request that entered here parted from what its ring kept; None if that is not known.
        key_id: as for recent_requests."""
        return self._serving.journal.explanations.find(request_id, key_id)

    def answered(self, request_id: str, key_id: str | None = None) -> AnsweredRequest | None:
        """The rings that computed a request that entered here; None if it is not known. key_id: as for
        recent_requests."""
        return self._serving.router.answered(request_id, key_id)

    def request_stats(self) -> dict[str, Any]:
        """Statistics of the requests that entered here."""
        return self._serving.journal.history.stats()

    # memory

    def memory(self, *, whole_mesh: bool) -> dict[str, Any]:
        """The memory of this machine; with whole_mesh also the last reading of every peer, from its telemetry."""
        stages = [describe_stage_memory(stage) for stage in self._host.beats()]
        answer: dict[str, Any] = {**self._hosting.monitor.describe(), "stages": stages}
        if whole_mesh:
            readings = self._membership.telemetry
            peers = [peer for peer in self._membership.view.peers() if peer.id in readings]
            answer["peers"] = [describe_peer_memory(peer, readings[peer.id]) for peer in peers]
        return answer

    def memory_live(self) -> list[dict[str, float]]:
        """The last readings of this machine's memory, oldest first."""
        return [snapshot.describe() for snapshot in self._hosting.monitor.kept]

"""What a node tells of itself and of the mesh: the questions of a MeshService that change nothing."""

from __future__ import annotations

import os
from typing import Any

from exo_mesh.domain.device import Telemetry
from exo_mesh.domain.fast_synch import resolve
from exo_mesh.hosting.stage_host import StageHost
from exo_mesh.instances.instances import Instances
from exo_mesh.membership.service import Membership
from exo_mesh.node import describe
from exo_mesh.node.diagnostics import Diagnostics
from exo_mesh.node.health import Health
from exo_mesh.node.observation import Observation
from exo_mesh.serving.journal import Journal
from exo_mesh.serving.router import Router
from exo_mesh.serving.traces import chrome_trace
from exo_mesh.settings.config import Settings


class Observed:
    """Half of `Node`: looks at its parts, and owns none of them."""

    settings: Settings
    membership: Membership
    journal: Journal
    observation: Observation
    _host: StageHost
    _instances: Instances
    _router: Router
    _phase: str
    diagnostics: Diagnostics
    _health: Health

    @property
    def node_id(self) -> str:
        return self.membership.own.id

    def state(self) -> dict[str, Any]:
        beats = {instance.plan.instance_id: self._host.beat(instance.plan.instance_id)
                 for _, instance in self._instances.all()}  # fmt: skip
        return {
            "node_id": self.node_id,
            "view": describe.describe_view(self.membership.view),
            "telemetry": {
                peer_id: describe.describe_telemetry(reading) for peer_id, reading in self.membership.telemetry.items()
            },
            "links": describe.topology(self.membership, self._instances)["links"],
            "cables": describe.describe_cables(self.membership.view),
            "fast_synch": resolve(self.settings.fast_synch, os.environ)._asdict(),
            "stages_here": {name: describe.describe_beat(beat) for name, beat in beats.items() if beat is not None},
            "health": self.health(),
        }

    def topology(self) -> dict[str, Any]:
        return describe.topology(self.membership, self._instances)

    def drain_state(self) -> dict[str, Any]:
        requests = len(self.journal)
        sequences = sum(stage.beat.sequences for stage in self._host.beats())
        draining = self._host.draining
        drained = draining and not requests and not sequences
        return {"draining": draining, "drained": drained, "requests": requests, "sequences": sequences}

    def queue(self) -> dict[str, Any]:
        return self.observation.queue()

    def recent_requests(self, most: int) -> list[dict[str, Any]]:
        return self.observation.recent_requests(most)

    def request_stats(self) -> dict[str, Any]:
        return self.observation.request_stats()

    def traces(self) -> list[dict[str, Any]]:
        return [trace.describe() for trace in self._router.traces.all()]

    def trace(self, wanted: str) -> dict[str, Any] | None:
        found = self._router.traces.find(wanted)
        return None if found is None else chrome_trace(found)

    def memory(self, *, whole_mesh: bool) -> dict[str, Any]:
        return self.observation.memory(whole_mesh=whole_mesh)

    def memory_live(self) -> list[dict[str, float]]:
        return self.observation.memory_live()

    def health(self) -> dict[str, Any]:
        return self._health.describe("draining" if self._phase == "ok" and self._host.draining else self._phase)

    async def diagnostics_of(self, peer_id: str = "") -> dict[str, Any] | None:
        return await self.diagnostics.of(peer_id)

    async def cluster_diagnostics(self) -> dict[str, Any]:
        return await self.diagnostics.cluster()

    async def cluster_timeline(self) -> dict[str, Any]:
        return await self.diagnostics.cluster_timeline()

    def _readings(self) -> list[tuple[str, str, Telemetry]]:
        """(id, name, last reading) of every live peer."""
        readings = self.membership.telemetry
        return [(peer.id, peer.name, readings[peer.id]) for peer in self.membership.view.peers() if peer.id in readings]

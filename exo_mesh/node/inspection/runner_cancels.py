"""Cancels the requests on a runner of any peer, without stopping the runner."""

from __future__ import annotations

from typing import Any

from exo_mesh.mesh.membership.service import Membership
from exo_mesh.node.inspection.asking import ask_peers
from exo_mesh.rings.serving.calls import cancel_on
from exo_mesh.rings.serving.journal import Journal


class RunnerCancels:
    """Cancels requests at their entry peers, which frees them on every stage within one lap."""

    def __init__(self, membership: Membership, journal: Journal) -> None:
        self._membership = membership
        self._journal = journal

    def instance_of(self, peer_id: str, runner: str) -> str:
        """Finds the instance of a runner on a peer, by the instance id, or the runner's pid or label; "" if none."""
        for _, instance in self._membership.view.instances():
            plan = instance.plan
            for index, stage in enumerate(plan.stages):
                if peer_id not in stage.peers:
                    continue
                pid = instance.pids[index] if index < len(instance.pids) else 0
                label = f"{plan.instance_id}[{stage.shard.start}:{stage.shard.stop}]"
                if runner in (plan.instance_id, label, str(pid)) or runner.startswith(f"{label} rank "):
                    return plan.instance_id
        return ""

    async def cancel(self, instance_id: str, request_id: str = "") -> dict[str, Any]:
        """Cancels the requests on an instance, or only those with an id; returns {"instance", "cancelled": number,
        "unreachable": peers that did not answer}."""
        calls = self._membership.calls
        here = self._journal.cancel_on(instance_id, request_id)
        answers, unreachable = await ask_peers(
            self._membership, lambda peer: cancel_on(calls, peer.id, instance_id, request_id)
        )
        return {
            "instance": instance_id,
            "cancelled": here + sum(count for _, count in answers),
            "unreachable": unreachable,
        }

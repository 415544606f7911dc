"""Cancels what runs on a runner of any peer, and leaves the runner as it is."""

from __future__ import annotations

from typing import Any

from exo_mesh.inspection.asking import ask_peers
from exo_mesh.membership.service import Membership
from exo_mesh.serving.journal import Journal


class RunnerCancels:
    """Requests are cancelled at the peers where they entered: that frees them on every stage within one lap."""

    def __init__(self, membership: Membership, journal: Journal) -> None:
        self._membership = membership
        self._journal = journal

    def instance_of(self, peer_id: str, runner: str) -> str:
        """The instance whose stage on a peer is meant: by its id, or the pid or label of the runner; "" for none."""
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
        """End the requests that run on an instance, or only those with an id; {"instance", "cancelled": how many,
        "unreachable": peers that did not answer}."""
        here = self._journal.cancel_on(instance_id, request_id)
        answers, unreachable = await ask_peers(
            self._membership, lambda peer: peer.client.cancel_on(instance_id, request_id)
        )
        return {
            "instance": instance_id,
            "cancelled": here + sum(count for _, count in answers),
            "unreachable": unreachable,
        }

"""Follows the energy of the rings whose driver runs on this node."""

from __future__ import annotations

from collections.abc import Iterator

from exo_mesh.base.telemetry.hardware_metrics import HardwareMetrics
from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.domain.power import MachineEnergy, RingCounts, RingEnergy
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting.stage_host import StageHost

WINDOW_S = 2.0
"""Seconds of a window, as often as the meters of the machines are read: a shorter one would often see no new energy."""


async def keep_ring_energy(membership: Membership, host: StageHost, metrics: HardwareMetrics) -> None:
    """Take a window every WINDOW_S, until cancelled; the sums are among the metrics. Costs nothing where no driver
    runs."""
    energy = RingEnergy()
    metrics.sources.append(energy.samples)
    while True:
        await next_wakeup(WINDOW_S)
        if energy.totals or any(stage.is_driver for stage in host.beats()):
            take_window(membership, host, energy)


def take_window(membership: Membership, host: StageHost, energy: RingEnergy) -> None:
    """End a window, with the last reported tokens and energy of all peers."""
    machines = {
        peer_id: MachineEnergy(reading.hardware.machine.energy_j, reading.hardware.machine_digest)
        for peer_id, reading in membership.telemetry.items()
        if reading.hardware.machine.energy_j is not None
    }
    energy.take(machines, _rings(membership, host))


def _rings(membership: Membership, host: StageHost) -> Iterator[RingCounts]:
    prompts = {stage.instance_id: stage.beat.prompts for stage in host.beats() if stage.is_driver}
    readings, own_id = membership.telemetry, membership.own.id
    for _, instance in membership.view.instances():
        plan, name = instance.plan, instance.plan.instance_id
        driver = readings.get(plan.peer_ids[-1])
        if driver is None or name not in driver.tokens:
            continue
        is_here = plan.peer_ids[-1] == own_id
        counts = driver.prompt_tokens.get(name, 0), driver.tokens[name], prompts.get(name, 0)
        yield RingCounts(name, plan.model, sorted(plan.member_ids), *counts, is_here=is_here)

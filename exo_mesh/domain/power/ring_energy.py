"""The energy of rings, apportioned by tokens. Pure; docs/reference/power.md has the formula and its limits.

In each window, the energy that a machine used is divided equally among all tokens that the rings on it computed in this
window, prompt tokens and output tokens alike. What a machine uses while its rings compute nothing belongs to no token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MachineEnergy:
    """What a peer's machine has used since that peer started. machine_digest: equal for peers on one machine; 0: its
    own."""

    energy_j: float
    machine_digest: int = 0


@dataclass(frozen=True, slots=True)
class RingCounts:
    """What a ring has computed so far. members: ids of its peers. is_here: its driver runs on this node."""

    instance_id: str
    model: str
    members: Sequence[str]
    prompt_tokens: int
    output_tokens: int
    prompts: int = 0
    is_here: bool = True

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(slots=True)
class RingEnergyTotals:
    """Of one ring, over all windows in which the energy of all its machines was known."""

    model: str
    prompt_j: float = 0.0
    output_j: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prompts: int = 0


class RingEnergy:
    """Give `take` what is known at the end of each window. `totals` has the rings whose driver runs here."""

    def __init__(self) -> None:
        self.totals: dict[str, RingEnergyTotals] = {}
        self._machines: dict[str, MachineEnergy] = {}
        self._rings: dict[str, RingCounts] = {}

    def take(self, machines: Mapping[str, MachineEnergy], rings: Iterable[RingCounts]) -> None:
        """machines: by peer; those whose energy is unknown are absent. rings: all that are placed."""
        now = {ring.instance_id: ring for ring in rings}
        gained = self._gained(machines)
        done = {name: counts for name, ring in now.items() if (counts := self._done(ring)) is not None}
        tokens: dict[str | int, int] = {}
        for counts in done.values():
            for machine in _machines_of(counts, machines):
                tokens[machine] = tokens.get(machine, 0) + counts.tokens
        for counts in done.values():
            if counts.is_here and counts.tokens:
                self._add(counts, machines, gained, tokens)
        self._machines, self._rings = dict(machines), now
        for name in self.totals.keys() - now.keys():
            del self.totals[name]

    def _gained(self, machines: Mapping[str, MachineEnergy]) -> dict[str | int, float]:
        """By machine, from the first of its peers: they all read the same counters."""
        gained: dict[str | int, float] = {}
        for peer_id in sorted(machines):
            energy, before = machines[peer_id], self._machines.get(peer_id)
            key = energy.machine_digest or peer_id
            if before is not None and key not in gained and energy.energy_j >= before.energy_j:
                gained[key] = energy.energy_j - before.energy_j
        return gained

    def _done(self, ring: RingCounts) -> RingCounts | None:
        """What a ring computed in this window; None in its first, and after its driver was started again."""
        before = self._rings.get(ring.instance_id)
        if before is None or ring.prompt_tokens < before.prompt_tokens or ring.output_tokens < before.output_tokens:
            return None
        return RingCounts(
            ring.instance_id,
            ring.model,
            ring.members,
            ring.prompt_tokens - before.prompt_tokens,
            ring.output_tokens - before.output_tokens,
            max(0, ring.prompts - before.prompts),
            ring.is_here,
        )

    def _add(
        self,
        done: RingCounts,
        machines: Mapping[str, MachineEnergy],
        gained: Mapping[str | int, float],
        tokens: Mapping[str | int, int],
    ) -> None:
        used_by = _machines_of(done, machines)
        if any(peer_id not in machines for peer_id in done.members) or not used_by <= gained.keys():
            return  # of a member nobody knows the energy, so nobody knows that of the ring
        joules = sum(gained[machine] * done.tokens / tokens[machine] for machine in used_by)
        total = self.totals.setdefault(done.instance_id, RingEnergyTotals(done.model))
        total.prompt_j += joules * done.prompt_tokens / done.tokens
        total.output_j += joules * done.output_tokens / done.tokens
        total.prompt_tokens += done.prompt_tokens
        total.output_tokens += done.output_tokens
        total.prompts += done.prompts

    def samples(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """For Prometheus; see exo_mesh/telemetry/hardware_metrics.py."""
        for name, total in list(self.totals.items()):
            ring = (total.model, name)
            yield "ring_energy_joules_total", (*ring, "prompt"), total.prompt_j
            yield "ring_energy_joules_total", (*ring, "output"), total.output_j
            yield "ring_energy_tokens_total", (*ring, "prompt"), total.prompt_tokens
            yield "ring_energy_tokens_total", (*ring, "output"), total.output_tokens
            yield "ring_energy_prompts_total", ring, total.prompts


def _machines_of(ring: RingCounts, machines: Mapping[str, MachineEnergy]) -> set[str | int]:
    return {machines[peer_id].machine_digest or peer_id for peer_id in ring.members if peer_id in machines}

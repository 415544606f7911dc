"""Divides the energy of machines among rings by tokens. Pure; docs/reference/power.md has the formula.

In each window, the energy that a machine used is divided equally among all tokens that the rings on it computed in this
window, prompt tokens and output tokens alike. Energy that a machine uses while its rings compute nothing is assigned to
no token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MachineEnergy:
    """Energy that a peer's machine has used since the peer started. machine_digest: equal for peers on one machine; 0:
    the peer has a machine of its own."""

    energy_j: float
    machine_digest: int = 0


@dataclass(frozen=True, slots=True)
class RingCounts:
    """Token counts of a ring so far. members: ids of its peers. is_here: its driver runs on this node."""

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
    """Energy of one ring, over all windows in which the energy of all its machines was known."""

    model: str
    prompt_j: float = 0.0
    output_j: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prompts: int = 0


class RingEnergy:
    """Adds up the energy per ring. Call `take` at each window's end; `totals` has the rings whose driver runs here."""

    def __init__(self) -> None:
        self.totals: dict[str, RingEnergyTotals] = {}
        self._machines: dict[str, MachineEnergy] = {}
        self._rings: dict[str, RingCounts] = {}

    def take(self, machines: Mapping[str, MachineEnergy], rings: Iterable[RingCounts]) -> None:
        """Adds one window. machines: energy by peer; peers whose energy is unknown are absent. rings: all placed."""
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
        """Energy used in this window by machine, from the first of its peers: all of them read the same counters."""
        gained: dict[str | int, float] = {}
        for peer_id in sorted(machines):
            energy, before = machines[peer_id], self._machines.get(peer_id)
            key = energy.machine_digest or peer_id
            if before is not None and key not in gained and energy.energy_j >= before.energy_j:
                gained[key] = energy.energy_j - before.energy_j
        return gained

    def _done(self, ring: RingCounts) -> RingCounts | None:
        """Tokens of a ring in this window; None in the ring's first window, and after its driver restarted."""
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
            return  # without the energy of one member, the energy of the ring is unknown
        joules = sum(gained[machine] * done.tokens / tokens[machine] for machine in used_by)
        total = self.totals.setdefault(done.instance_id, RingEnergyTotals(done.model))
        total.prompt_j += joules * done.prompt_tokens / done.tokens
        total.output_j += joules * done.output_tokens / done.tokens
        total.prompt_tokens += done.prompt_tokens
        total.output_tokens += done.output_tokens
        total.prompts += done.prompts

    def samples(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """Yields (metric, labels, value) for Prometheus; see exo_mesh/base/telemetry/hardware_metrics.py."""
        for name, total in list(self.totals.items()):
            ring = (total.model, name)
            yield "ring_energy_joules_total", (*ring, "prompt"), total.prompt_j
            yield "ring_energy_joules_total", (*ring, "output"), total.output_j
            yield "ring_energy_tokens_total", (*ring, "prompt"), total.prompt_tokens
            yield "ring_energy_tokens_total", (*ring, "output"), total.output_tokens
            yield "ring_energy_prompts_total", ring, total.prompts


def _machines_of(ring: RingCounts, machines: Mapping[str, MachineEnergy]) -> set[str | int]:
    return {machines[peer_id].machine_digest or peer_id for peer_id in ring.members if peer_id in machines}

"""Power, temperature and load of a machine and its accelerators, and its energy by ring. Pure values.

None means that the value could not be read; it is never written as 0. `sources` names the source of each value, by the
value's name: "nvml", "nvidia-smi", "amdgpu", "rapl", "macmon", … Several sources are joined by "+".

In each window, the energy that a machine used is divided equally among all tokens that the rings on it computed in this
window, prompt tokens and output tokens alike. Energy that a machine uses while its rings compute nothing is assigned to
no token. docs/reference/power.md has the formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from exo_mesh.domain.fields import Cut, NotSent

VALUES = (
    "utilization", "power_w", "temperature_c", "memory_used_bytes", "memory_total_bytes", "mapped_used_bytes",
    "mapped_total_bytes", "clock_hz", "energy_j",
)  # fmt: skip
"""Names of the values, in the order of their numbers in protos/exo_mesh/wire/proto/control.proto."""

DIGITS = {"utilization": 3, "power_w": 2, "temperature_c": 1, "clock_hz": 0, "energy_j": 1}
"""Decimals of the values that are not whole numbers; more decimals would be noise."""

MAX_ACCELERATORS = 32
_Word = Annotated[str, Cut(16)]


class DeviceValues(msgspec.Struct, frozen=True):
    """The values of one device. utilization: 0 to 1. mapped: system memory that a GPU may map, besides its own (GTT).
    energy_j: a counter that only grows; its start depends on the source. sources: by name of the value."""

    utilization: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    mapped_used_bytes: int | None = None
    mapped_total_bytes: int | None = None
    clock_hz: float | None = None
    energy_j: float | None = None
    sources: Mapping[str, str] = msgspec.field(default_factory=dict)

    @staticmethod
    def of(source: str, **values: float | None) -> DeviceValues:
        """Makes rounded values that all come from one source; a value of None has no source."""
        known = {name: _rounded(name, value) for name, value in values.items() if value is not None}
        return DeviceValues(**known, sources=dict.fromkeys(known, source))  # type: ignore[arg-type]

    def merged(self, other: DeviceValues) -> DeviceValues:
        """Returns these values, completed by the values of `other`."""
        missing = [name for name in VALUES if getattr(self, name) is None and getattr(other, name) is not None]
        if not missing:
            return self
        values = {name: getattr(other if name in missing else self, name) for name in VALUES}
        return DeviceValues(**values, sources={**other.sources, **self.sources})

    def describe(self) -> dict[str, Any]:
        """Returns the known values as JSON values; unknown values are absent."""
        known = {name: value for name in VALUES if (value := getattr(self, name)) is not None}
        return {**known, "sources": {name: self.sources[name] for name in known if name in self.sources}}


UNKNOWN = DeviceValues()


class AcceleratorReading(msgspec.Struct, frozen=True):
    """One GPU or NPU. id: "gpu0", "npu0", unique on its machine. kind: gpu or npu. in_processor: it is part of the
    processor package, so the package's energy counter includes it; only its own node knows this."""

    id: _Word
    kind: _Word
    vendor: _Word
    name: Annotated[str, Cut(128)]
    values: DeviceValues = UNKNOWN
    in_processor: Annotated[bool, NotSent()] = False

    def describe(self) -> dict[str, Any]:
        return {"id": self.id, "kind": self.kind, "vendor": self.vendor, "name": self.name, **self.values.describe()}


class PartPower(msgspec.Struct, frozen=True):
    """Power of one part of a machine, and its energy since the node started. name: "cpu", "memory", "machine" (all of
    it), or the id of an accelerator."""

    name: str
    source: str
    power_w: float | None = None
    energy_j: float | None = None


class HardwareReading(msgspec.Struct, frozen=True):
    """The readings of one machine. machine: of the whole machine; its energy_j counts from the start of the node.
    machine_digest: equal for nodes on one machine, so that its energy is not counted twice; 0: unknown. parts: not sent
    to other peers."""

    machine: DeviceValues = UNKNOWN
    accelerators: Annotated[tuple[AcceleratorReading, ...], Cut(MAX_ACCELERATORS)] = ()
    machine_digest: int = 0
    parts: Annotated[tuple[PartPower, ...], NotSent()] = ()

    def describe(self) -> dict[str, Any]:
        """Returns the readings as JSON values, without the parts."""
        return {
            "machine": self.machine.describe(),
            "accelerators": [accelerator.describe() for accelerator in self.accelerators],
        }


NO_HARDWARE = HardwareReading()


def joined(sources: Iterable[str]) -> str:
    """Joins the sources, each once and in order: "rapl+nvml"."""
    return "+".join(dict.fromkeys(source for source in sources if source))


def _rounded(name: str, value: float) -> float:
    digits = DIGITS.get(name)
    return int(value) if digits is None else round(value, digits)


class MachineEnergy(msgspec.Struct, frozen=True):
    """Energy that a peer's machine has used since the peer started. machine_digest: equal for peers on one machine; 0:
    the peer has a machine of its own."""

    energy_j: float
    machine_digest: int = 0


class RingCounts(msgspec.Struct, frozen=True):
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


class RingEnergyTotals(msgspec.Struct):
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

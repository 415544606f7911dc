"""Computes the power and energy of each part and of the machine since the start, from counters and watts.

Pure: the caller gives the time. The energy of a part is the gain of its counter; without a counter its watts are summed
over the time between two readings, and the source of that energy ends in "*".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.power import UNKNOWN, AcceleratorReading, DeviceValues, HardwareReading, PartPower, joined
from exo_mesh.machine.power.system_files import MAX_W, EnergyZone, gained_uj, watts_or_none

MAX_GAP_S = 120.0
"""After a longer pause (the machine slept) the energy in between is not counted: a processor's counter may have wrapped
several times, and the consumption is unknown."""

RAPL = "rapl"
SUMMED = "*"


class RawReading(msgspec.Struct, frozen=True):
    """Everything that was read at one moment. parts: further parts with watts. whole: a sensor of the whole machine, if
    there is one: then the parts are not summed. machine: other figures of the machine."""

    accelerators: Sequence[AcceleratorReading] = ()
    zones: Sequence[EnergyZone] = ()
    parts: Sequence[PartPower] = ()
    whole: PartPower | None = None
    machine: DeviceValues = UNKNOWN


class _Gain(msgspec.Struct, frozen=True):
    """A part's gain since the last reading. gained_j: None if unknown. is_summed: it was summed from watts."""

    name: str
    source: str
    power_w: float | None
    gained_j: float | None
    is_summed: bool = False
    in_processor: bool = False


class EnergyMeter:
    """Computes energy from readings; pass every reading to `take`, in order."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._zones: dict[str, EnergyZone] = {}
        self._counters: dict[str, float] = {}
        self._joules: defaultdict[str, float] = defaultdict(float)
        self._machine_j: float | None = None

    def take(self, now: float, raw: RawReading) -> HardwareReading:
        """Returns the figures after this reading."""
        elapsed_s = now - self._at if self._at is not None and 0 < now - self._at <= MAX_GAP_S else 0.0
        accelerators = with_ids(raw.accelerators)
        gains = [*self._processors(raw.zones, elapsed_s), *(_summed(part, elapsed_s) for part in raw.parts)]
        gains += [gain for one in accelerators if (gain := self._accelerator(one, elapsed_s)) is not None]
        whole = [] if raw.whole is None else [_summed(raw.whole, elapsed_s)]
        self._at = now
        self._zones = {zone.name: zone for zone in raw.zones}
        self._counters = {one.id: one.values.energy_j for one in accelerators if one.values.energy_j is not None}
        has_processor = any(gain.name == "cpu" for gain in gains)
        counted = whole or [gain for gain in gains if not (gain.in_processor and has_processor)]
        by_name = {gain.name: gain for gain in gains}
        return HardwareReading(
            machine=raw.machine.merged(self._machine(counted)),
            accelerators=tuple(_with_power(one, by_name.get(one.id)) for one in accelerators),
            parts=tuple(self._part(gain) for gain in (*gains, *whole)),
        )

    def _processors(self, zones: Iterable[EnergyZone], elapsed_s: float) -> Iterator[_Gain]:
        watts: dict[str, float] = {}
        for zone in zones:
            before = self._zones.get(zone.name)
            if before is None or not elapsed_s:
                continue
            drawn_w = gained_uj(before, zone) / 1e6 / elapsed_s
            if drawn_w < MAX_W:  # a higher figure means that the counter was reset, which is not a wrap
                watts[zone.part] = watts.get(zone.part, 0.0) + drawn_w
        for part, drawn_w in watts.items():
            yield _Gain(part, RAPL, watts_or_none(drawn_w), drawn_w * elapsed_s)

    def _accelerator(self, one: AcceleratorReading, elapsed_s: float) -> _Gain | None:
        values = one.values
        watts, counter = values.power_w, values.energy_j
        source = values.sources.get("power_w", "") or values.sources.get("energy_j", "")
        if counter is None:
            if watts is None:
                return None
            return _Gain(one.id, source, watts, watts * elapsed_s, is_summed=True, in_processor=one.in_processor)
        before = self._counters.get(one.id)
        gained_j = None if before is None or not elapsed_s else counter - before
        if gained_j is not None and not 0 <= gained_j < MAX_W * elapsed_s:  # the driver was reloaded
            gained_j = None
        if watts is None and gained_j is not None:
            watts = watts_or_none(gained_j / elapsed_s)
        return _Gain(one.id, source, watts, gained_j, in_processor=one.in_processor)

    def _machine(self, counted: Sequence[_Gain]) -> DeviceValues:
        """Returns the sum of the counted parts."""
        gained = [gain for gain in counted if gain.gained_j is not None]
        if gained:
            self._machine_j = (self._machine_j or 0.0) + sum(gain.gained_j or 0.0 for gain in gained)
        known = [gain for gain in counted if gain.power_w is not None]
        watts = watts_or_none(sum(gain.power_w or 0.0 for gain in known))
        power = DeviceValues.of(joined(gain.source for gain in known), power_w=watts)
        energy_source = joined(f"{gain.source}{SUMMED if gain.is_summed else ''}" for gain in gained)
        return power.merged(DeviceValues.of(energy_source, energy_j=self._machine_j))

    def _part(self, gain: _Gain) -> PartPower:
        """Returns a part with its whole energy since the start."""
        if gain.gained_j is not None:
            self._joules[gain.name] += gain.gained_j
        return PartPower(gain.name, gain.source, gain.power_w, self._joules.get(gain.name))


def with_ids(accelerators: Iterable[AcceleratorReading]) -> list[AcceleratorReading]:
    """Gives the accelerators ids: gpu0, gpu1, npu0, … Existing ids are kept."""
    found: list[AcceleratorReading] = []
    for one in accelerators:
        if not one.id:
            taken = {other.id for other in found}
            number = next(number for number in range(len(taken) + 1) if f"{one.kind}{number}" not in taken)
            one = replace(one, id=f"{one.kind}{number}")
        found.append(one)
    return found


def _summed(part: PartPower, elapsed_s: float) -> _Gain:
    gained_j = None if part.power_w is None else part.power_w * elapsed_s
    return _Gain(part.name, part.source, part.power_w, gained_j, is_summed=True)


def _with_power(one: AcceleratorReading, gain: _Gain | None) -> AcceleratorReading:
    """Adds the watts that follow from the counter to an accelerator that has only a counter."""
    if gain is None or one.values.power_w is not None or gain.power_w is None:
        return one
    return replace(one, values=one.values.merged(DeviceValues.of(gain.source, power_w=gain.power_w)))

"""Measures the cost of reading power and temperature: CPU time of the event loop and of the reading thread.

python -m tools.power_cost              this machine as it is
python -m tools.power_cost --recorded   with a GPU of NVIDIA, two of AMD, an NPU and RAPL, as files and a stand-in
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from exo_mesh.base.telemetry.hardware_metrics import HardwareMetrics
from exo_mesh.domain.device import Telemetry
from exo_mesh.domain.power import HardwareReading
from exo_mesh.machine.power.meter import READ_EVERY_S, HardwareMeter
from exo_mesh.machine.power.nvidia import NvidiaReader
from exo_mesh.machine.power.samples import hardware_samples
from exo_mesh.wire.control_codec import telemetry_to_proto

OWN_READINGS_PER_S, METRIC_ROUNDS_PER_S = 2.0, 1.0
"""How often a node encodes its own reading for its peers, and refreshes its metrics."""


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", action="store_true", help="with recorded hardware instead of this machine's")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cost = measured(recorded_meter(Path(scratch)) if args.recorded else HardwareMeter(nvidia=NvidiaReader()))
    names = [one.name for one in cost.reading.accelerators]
    print(f"{len(names)} accelerators: {', '.join(names) or 'none'}")
    print(f"event loop: {1e3 * cost.loop_s:.3f} ms every {READ_EVERY_S:g} s")
    print(f"reading thread: {1e3 * cost.read_s:.3f} ms every {READ_EVERY_S:g} s")
    return 0


@dataclass(frozen=True, slots=True)
class ReadingCost:
    """CPU seconds every READ_EVERY_S: of the event loop, and of the reading thread."""

    reading: HardwareReading
    loop_s: float
    read_s: float


def measured(meter: HardwareMeter, rounds: int = 5, times: int = 200) -> ReadingCost:
    """Repeats what a node does with its meter, and measures it."""
    reading = meter.read()
    metrics = HardwareMetrics()
    metrics.sources.append(lambda: hardware_samples(meter.last))
    telemetry = Telemetry("a" * 32, 1, 1, 1, 0, hardware=reading)
    encode_s = cpu_s(lambda: telemetry_to_proto(telemetry), rounds, times)
    refresh_s = cpu_s(metrics.refresh, rounds, times)
    loop_s = READ_EVERY_S * (OWN_READINGS_PER_S * encode_s + METRIC_ROUNDS_PER_S * refresh_s)
    return ReadingCost(reading, loop_s, cpu_s(meter.read, rounds, times // 10))


def recorded_meter(root: Path) -> HardwareMeter:
    """Returns a meter of recorded files, and of a simulated NVIDIA driver in this process."""
    from tests.machine.test_power_nvidia import an_h100
    from tests.support.recorded import plant

    for name in ("amd-apu", "amd-card", "rk3588", "intel-laptop"):
        plant(root, f"{name}.sysfs")
    driver = an_h100()
    return HardwareMeter(root, "off", NvidiaReader(lambda: driver, lambda: "", lambda: True))


def cpu_s(work: Callable[[], object], rounds: int, times: int) -> float:
    """Returns CPU seconds of this thread for one call: the minimum of several rounds."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(times):
            work()
        best = min(best, (time.thread_time() - begin) / times)
    return best


if __name__ == "__main__":
    raise SystemExit(main())

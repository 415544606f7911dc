"""The meter puts all sources together, keeps the newest figures for the event loop, and shows them as metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest

from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.domain.power import NO_HARDWARE, DeviceValues
from exo_mesh.machine.accelerator_readings import read_machine
from exo_mesh.machine.power.meter import STALE_S, HardwareMeter, SystemLoad, machine_digest
from exo_mesh.machine.power.nvidia import NvidiaReader
from tests.machine.test_power_nvidia import an_h100
from tests.support.processes import eventually
from tests.support.recorded import plant, write
from tools.power_cost import measured, recorded_meter


class Meter(HardwareMeter):
    """With a clock that moves by hand, and a system that is never busy."""

    def __init__(self, root: Path, nvidia: NvidiaReader | None = None) -> None:
        self.now = 50.0
        load = DeviceValues.of("system", utilization=0.0)
        super().__init__(root, "off", nvidia, lambda: self.now, lambda: load)


def shown(meter: HardwareMeter) -> str:
    metrics = Metrics()
    meter.start(metrics.hardware)
    assert eventually(lambda: meter.last != NO_HARDWARE)
    meter.close()
    return generate_latest(metrics.registry).decode()


def test_all_sources_together_make_one_reading(tmp_path: Path) -> None:
    nvidia = NvidiaReader(an_h100, lambda: "", lambda: True)
    meter = Meter(plant(tmp_path, "amd-card.sysfs"), nvidia)
    meter.read()
    write(tmp_path, "class/powercap/intel-rapl:0/energy_uj", str(1_000_000 + 60_000_000))
    meter.now += 2.0
    reading = meter.read()
    assert [(one.id, one.vendor) for one in reading.accelerators] == [("gpu0", "nvidia"), ("gpu1", "amd")]
    assert reading.machine.power_w == 30.0 + 412.5 + 312.0
    assert reading.machine.sources["power_w"] == "rapl+nvml+amdgpu"
    assert reading.machine.temperature_c == 72.5 and reading.machine_digest == machine_digest() != 0
    nvidia.close()


def test_what_is_unknown_has_no_series_and_what_is_0_has_one(tmp_path: Path) -> None:
    text = shown(Meter(tmp_path))
    assert "exo_mesh_cpu_utilization_ratio 0.0" in text
    for line in text.splitlines():
        assert line.startswith("#") or not any(word in line for word in ("watts", "joules", "celsius", "accelerator"))


def test_metrics_are_in_base_units(tmp_path: Path) -> None:
    text = shown(Meter(plant(tmp_path, "amd-card.sysfs")))
    for line in (
        'exo_mesh_accelerator_info{accelerator="gpu0",kind="gpu",name="Radeon RX 7900 XTX",vendor="amd"} 1.0',
        'exo_mesh_accelerator_utilization_ratio{accelerator="gpu0"} 0.87',
        'exo_mesh_accelerator_memory_size_bytes{accelerator="gpu0"} 2.575302656e+10',
        'exo_mesh_power_part_watts{part="gpu0",source="amdgpu"} 312.0',
        "exo_mesh_power_watts 312.0",
        "exo_mesh_temperature_celsius 72.5",
    ):
        assert line in text.splitlines(), line


def test_figures_of_a_meter_that_hangs_are_not_shown(tmp_path: Path) -> None:
    meter = Meter(plant(tmp_path, "amd-card.sysfs"))
    meter.read()
    meter.now += STALE_S
    assert meter.last.machine.power_w == 312.0
    meter.now += 0.1
    assert meter.last == NO_HARDWARE


def test_an_error_does_not_end_the_readings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    meter, calls = Meter(tmp_path), []

    def read() -> DeviceValues:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no such processor")
        return DeviceValues.of("system", utilization=0.5)

    meter._read_system = read
    meter._every_s = 0.001
    assert "exo_mesh_cpu_utilization_ratio 0.5" in shown(meter)
    assert "it will be retried" in caplog.text


def test_the_load_of_this_machine_is_a_share() -> None:
    read = SystemLoad()
    assert read().utilization is None, "nothing is known of the time before"
    assert eventually(lambda: read().utilization is not None)
    load = read()
    assert load.utilization is None or 0 <= load.utilization <= 1
    assert load.memory_used_bytes is not None and load.memory_total_bytes is not None
    assert 0 < load.memory_used_bytes < load.memory_total_bytes


def test_the_memory_that_models_may_take_comes_from_the_same_driver() -> None:
    nvidia = NvidiaReader(an_h100, lambda: "", lambda: True)
    (gpu,) = read_machine(read_nvidia=nvidia.gpus).nvidia
    assert (gpu.index, gpu.name, gpu.total_bytes, gpu.free_bytes) == (0, "NVIDIA H100", 80 * 10**9, 50 * 10**9)
    nvidia.close()


def test_the_event_loop_pays_less_than_a_millisecond_every_two_seconds(tmp_path: Path) -> None:
    cost = measured(recorded_meter(tmp_path), rounds=5, times=20)
    assert len(cost.reading.accelerators) == 4 and cost.loop_s < 1e-3

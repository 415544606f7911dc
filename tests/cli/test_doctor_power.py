"""What the doctor says of readings of power and temperature."""

from __future__ import annotations

from pathlib import Path

from exo_mesh.cli.doctor.power import PowerSources, check_power, read_power_sources
from tests.support.recorded import plant


def test_it_says_what_there_is_and_what_would_give_more() -> None:
    locked = [Path("/sys/class/powercap/intel-rapl:0/energy_uj")]
    said = check_power(PowerSources(sensors=True, locked=locked, nvidia_driver=True, is_mac=True))
    assert [finding.text for finding in said] == [
        "readings: temperature, NVIDIA by nvidia-smi",
        "only root may read /sys/class/powercap/intel-rapl:0/energy_uj, so the energy of the processor is unknown",
        "nvidia-ml-py is not installed: the node runs nvidia-smi every 15 s instead, which has no energy counter",
        "power and temperature of this Mac are unknown",
    ]
    assert all(finding.level == "ok" for finding in said), "a node works without"
    assert all(finding.remedy for finding in said[1:])


def test_it_sees_what_the_meter_sees(tmp_path: Path) -> None:
    (finding,) = check_power(read_power_sources(plant(tmp_path, "amd-card.sysfs"), "off"))
    assert finding.text.startswith("readings: amd gpu, processor energy, temperature")
    (finding,) = check_power(PowerSources())
    assert finding.text == "readings: none; see docs/reference/power.md"

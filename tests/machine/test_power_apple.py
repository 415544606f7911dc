"""macOS: the lines of mactop and macmon (tests/machine/recorded), and the tool as a child that is watched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exo_mesh.machine.power.apple import AppleSample, AppleTool, arguments_of, find_tool, parse_line
from exo_mesh.machine.power.energy_meter import EnergyMeter, RawReading
from exo_mesh.machine.power.meter import with_sample
from tests.support.processes import eventually
from tests.support.recorded import RECORDED

SAYS = """#!/bin/sh
echo $$ >> "$0.pids"
cat "{samples}"
exec sleep 60
"""


def sample_of(tool: str, file: str) -> AppleSample:
    samples = [parse_line(tool, line) for line in (RECORDED / file).read_bytes().splitlines()]
    (found,) = [sample for sample in samples if sample is not None]
    return found


def test_a_sample_of_mactop() -> None:
    sample = sample_of("mactop", "mactop.jsonl")
    (gpu,) = sample.accelerators
    assert (gpu.id, gpu.vendor, gpu.name) == ("gpu0", "apple", "Apple M2 Max")
    told = gpu.values.describe()
    assert set(told.pop("sources").values()) == {"mactop"}
    assert told == {
        "utilization": 0.965, "power_w": 22.5, "temperature_c": 61.2, "memory_used_bytes": 41231686042,
        "memory_total_bytes": 68719476736, "clock_hz": 1.296e9,
    }  # fmt: skip
    assert sample.machine.power_w == 43.0, "total_power; system_power is only what the parts leave of it"
    assert {part.name: part.power_w for part in sample.parts} == {
        "cpu": 7.25, "memory": 3.5, "npu0": 0, "gpu0": 22.5, "machine": 43.0,
    }  # fmt: skip


def test_samples_of_macmon_old_and_new() -> None:
    old, new = sample_of("macmon", "macmon-0.4.jsonl"), sample_of("macmon", "macmon-0.8.jsonl")
    assert (old.machine.power_w, old.accelerators[0].values.utilization) == (16.5, 0.375)
    assert old.accelerators[0].values.clock_hz == 6.24e8 and old.machine.utilization is None
    assert (new.machine.power_w, new.accelerators[0].values.utilization) == (19.0, 0.7)
    assert new.machine.utilization == 0.15 and new.accelerators[0].values.temperature_c == 52.2


def test_an_item_of_an_array_is_a_sample_and_zero_is_a_figure() -> None:
    sample = sample_of("mactop", "mactop-array.json")
    assert sample.accelerators[0].values.utilization == 0.0 and sample.accelerators[0].values.power_w == 0.0
    assert sample.machine.power_w == 11.5 and sample.machine.temperature_c is None


@pytest.mark.parametrize(
    "line",
    [b"", b"[\n", b"mactop: no such sensor", b"null", b"[1,2]", b'{"soc_metrics":', b"\xff\xfe", b"1" * 5000],
)
def test_junk_is_no_sample(line: bytes) -> None:
    assert parse_line("mactop", line) is None


def test_junk_within_a_sample_is_unknown() -> None:
    line = b'{"soc_metrics":[],"memory":{"total":"big","used":true},"cpu_usage":NaN,"gpu_usage":1e400,"system_info":3}'
    sample = parse_line("mactop", line)
    assert sample is not None and sample.machine.describe() == {"sources": {}} and sample.parts == ()
    assert parse_line("macmon", b'{"gpu_usage":[1],"temp":7,"sys_power":-4}') is not None


def test_the_energy_of_a_mac_is_added_up_from_the_sensor_of_the_whole() -> None:
    meter, raw = EnergyMeter(), with_sample(RawReading(), sample_of("mactop", "mactop.jsonl"))
    assert meter.take(0.0, raw).machine.power_w == 43.0
    reading = meter.take(2.0, raw)
    assert reading.machine.energy_j == 86.0 and reading.machine.sources["energy_j"] == "mactop*"
    assert {part.name: part.energy_j for part in reading.parts if part.energy_j}["gpu0"] == 45.0


def test_a_tool_is_looked_for_only_on_a_mac_unless_it_is_named() -> None:
    assert find_tool("off") == "" and find_tool("/x/macmon") == "/x/macmon"
    assert arguments_of("/x/macmon")[1] == "pipe" and arguments_of("/x/mactop")[1] == "--headless"


def tool_at(tmp_path: Path, name: str, script: str) -> AppleTool:
    program = tmp_path / name
    program.write_text(script)
    program.chmod(0o755)
    return AppleTool(str(program), first_retry_s=0.01)


def pids_of(tool: AppleTool) -> list[int]:
    file = Path(f"{tool.program}.pids")
    return [int(word) for word in file.read_text().split()] if file.exists() else []


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_tool_is_a_child_that_ends_with_the_node(tmp_path: Path) -> None:
    tool = tool_at(tmp_path, "mactop", SAYS.format(samples=RECORDED / "mactop.jsonl"))
    tool.start()
    assert eventually(lambda: tool.last is not None)
    (pid,) = pids_of(tool)
    assert tool.last is not None and tool.last.machine.power_w == 43.0
    tool.close()
    assert eventually(lambda: not is_running(pid))


def test_a_tool_that_ends_is_started_again_and_one_that_is_not_there_is_nothing(tmp_path: Path) -> None:
    tool = tool_at(tmp_path, "macmon", "#!/bin/sh\necho $$ >> $0.pids\necho junk\nexit 1\n")
    tool.start()
    assert eventually(lambda: len(pids_of(tool)) >= 3)
    assert tool.last is None
    tool.close()
    absent = AppleTool(str(tmp_path / "none"), first_retry_s=0.01)
    absent.start()
    assert absent.last is None
    absent.close()


def test_an_old_sample_is_no_reading(tmp_path: Path) -> None:
    now = [0.0]
    tool = tool_at(tmp_path, "macmon", SAYS.format(samples=RECORDED / "macmon-0.8.jsonl"))
    tool._clock = lambda: now[0]
    tool.start()
    assert eventually(lambda: tool.last is not None)
    now[0] = 11.0
    assert tool.last is None, "the tool hangs"
    tool.close()

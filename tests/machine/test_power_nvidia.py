"""NVIDIA's GPUs: by NVML opened once, by nvidia-smi at a low rate, and with drivers that fail, hang or go away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exo_mesh.machine.power.nvidia import FRESH_S, REOPEN_S, SMI_EVERY_S, NvidiaReader, NvmlSession, parse_smi
from tests.support.processes import eventually
from tests.support.recorded import RECORDED

SMI = (RECORDED / "nvidia-smi.csv").read_text()
MIB = 2**20


class DriverError(Exception):
    """What the driver raises for whatever it cannot do."""


class Driver:
    """Has the functions of the module pynvml that are used. tells: what its one GPU does not refuse to say."""

    NVMLError = DriverError
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, **tells: Any) -> None:
        self.tells = tells
        self.inits = self.shutdowns = self.asked = 0
        self.is_gone = False
        self.hangs: threading.Event | None = None

    def __getattr__(self, name: str) -> Any:
        return lambda handle, *args: self._tell(name.removeprefix("nvmlDeviceGet"))

    def nvmlInit(self) -> None:
        if self.is_gone:
            raise DriverError("Driver Not Loaded")
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def _tell(self, what: str) -> Any:
        self.asked += 1
        if self.hangs is not None:
            self.hangs.wait(30)
        if self.is_gone or what not in self.tells:
            raise DriverError("GPU is lost" if self.is_gone else "Not Supported")
        return self.tells[what]


def an_h100() -> Driver:
    return Driver(
        Name="NVIDIA H100", MemoryInfo=SimpleNamespace(total=80 * 10**9, used=30 * 10**9, free=50 * 10**9),
        UtilizationRates=SimpleNamespace(gpu=64, memory=20), PowerUsage=412_500, TotalEnergyConsumption=9_000_500,
        ClockInfo=1755, Temperature=58,
    )  # fmt: skip


class Reader(NvidiaReader):
    """With a clock that moves by hand, and a count of the processes of nvidia-smi."""

    def __init__(self, driver: Any, smi: str = "", deadline_s: float = 30.0) -> None:
        self.now, self.asked = 1000.0, 0
        self.smi = smi
        super().__init__(lambda: driver, self._count, lambda: True, lambda: self.now, deadline_s)

    def _count(self) -> str:
        self.asked += 1
        return self.smi


def test_nvml_tells_everything_in_base_units() -> None:
    (gpu,) = NvmlSession(an_h100()).read()
    told = gpu.values.describe()
    assert (gpu.id, gpu.vendor, gpu.name) == ("gpu0", "nvidia", "NVIDIA H100")
    assert set(told.pop("sources").values()) == {"nvml"}
    assert told == {
        "utilization": 0.64, "power_w": 412.5, "temperature_c": 58.0, "memory_used_bytes": 30 * 10**9,
        "memory_total_bytes": 80 * 10**9, "clock_hz": 1.755e9, "energy_j": 9000.5,
    }  # fmt: skip


def test_what_a_gpu_does_not_say_is_absent() -> None:
    (gpu,) = NvmlSession(Driver(Name="NVIDIA GB10", UtilizationRates=SimpleNamespace(gpu=0), PowerUsage=0)).read()
    assert gpu.values.describe() == {"utilization": 0.0, "sources": {"utilization": "nvml"}}


def test_the_driver_is_opened_once_and_its_figures_are_shared_for_a_second() -> None:
    driver = an_h100()
    reader = Reader(driver)
    assert reader.read()[0].values.power_w == 412.5
    driver.tells["PowerUsage"] = 100_000
    assert reader.read()[0].values.power_w == 412.5
    reader.now += FRESH_S
    assert reader.read()[0].values.power_w == 100.0
    assert [gpu.free_bytes for gpu in reader.gpus()] == [50 * 10**9]
    assert (driver.inits, reader.asked) == (1, 0), "and nvidia-smi was not needed"
    reader.close()


def test_a_driver_that_goes_away_is_opened_again_when_it_is_back() -> None:
    driver = an_h100()
    reader = Reader(driver)
    assert reader.read()
    driver.is_gone = True
    reader.now += 2
    assert reader.read() == ()
    assert driver.shutdowns == 1
    driver.is_gone = False
    reader.now += 2
    assert reader.read() == (), "it is not asked again at once"
    reader.now += REOPEN_S
    assert reader.read()[0].name == "NVIDIA H100"
    reader.close()


def test_nobody_waits_for_a_driver_that_hangs_for_longer_than_the_deadline() -> None:
    driver = an_h100()
    reader = Reader(driver, deadline_s=0.02)
    driver.hangs = threading.Event()
    assert reader.read() == () and reader.read() == ()
    assert driver.asked == 1, "however often it is asked, one call waits"
    driver.hangs.set()
    assert eventually(lambda: bool(reader.read()))
    reader.close()


def test_without_the_library_nvidia_smi_is_asked_rarely() -> None:
    reader = Reader(None, SMI)
    for _ in range(20):
        assert [gpu.name for gpu in reader.read()] == ["NVIDIA GeForce RTX 4090", "NVIDIA GB10"]
        reader.now += 2
    assert reader.asked == 1 + int(38 // (SMI_EVERY_S + 1)), "40 s: a process every 16 s, not one every 2 s"
    reader.close()


def test_what_nvidia_smi_prints_is_read_as_nvml_says_it() -> None:
    card, shared = parse_smi(SMI)
    told = card.values.describe()
    assert set(told.pop("sources").values()) == {"nvidia-smi"}
    assert told == {
        "utilization": 0.43, "power_w": 118.52, "temperature_c": 51.0, "memory_used_bytes": 1842 * MIB,
        "memory_total_bytes": 24564 * MIB, "clock_hz": 2.52e9,
    }  # fmt: skip
    assert shared.values.memory_total_bytes is None and shared.values.power_w == 9.1


def test_a_machine_without_a_driver_starts_no_thread() -> None:
    before = threading.active_count()
    reader = NvidiaReader(is_there=lambda: False)
    assert reader.read() == () and reader.gpus() == []
    assert threading.active_count() == before


SHIM = Path(__file__).parent / "recorded" / "fake_nvml.c"
ASK = """
import json
from exo_mesh.machine.power.nvidia import NvidiaReader
reader = NvidiaReader(ask_smi=lambda: "", is_there=lambda: True)
print(json.dumps([one.describe() for one in reader.read()]))
reader.close()
"""


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: cc is needed")
def test_the_real_nvidia_ml_py_reads_a_driver_library(tmp_path: Path) -> None:
    """The library is a shim with the functions of libnvidia-ml.so; everything above it is what runs with a GPU."""
    pytest.importorskip("pynvml", reason="pip install nvidia-ml-py")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", SHIM], check=True)
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ASK], env=environ, capture_output=True, text=True, check=True)
    first, second = json.loads(done.stdout)
    assert first["name"] == "Shim GPU 0" and first["id"] == "gpu0" and second["id"] == "gpu1"
    assert (first["power_w"], first["energy_j"], first["utilization"], first["temperature_c"]) == (250.0, 5e3, 0.75, 66)
    assert (first["memory_total_bytes"], first["memory_used_bytes"], first["clock_hz"]) == (2**34, 2**33, 1.5e9)
    assert second["sources"] == {"utilization": "nvml"}, "the second GPU refuses everything else"

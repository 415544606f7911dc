"""How much of a device's memory models may take, from what drivers really print on machines of many kinds."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from exo_mesh_dummy import provider as dummy

from exo_mesh.domain.device import PeerInfo
from exo_mesh.engine.registry import Registry
from exo_mesh.machine.accelerator_readings import STALE_READINGS, DeviceMemory, read_amd, read_machine, visible
from exo_mesh.machine.accelerators import (
    AmdGpu,
    Board,
    Machine,
    NvidiaGpu,
    accelerator_for,
    amd_reading,
    apple_reading,
    devices,
    nvidia_reading,
    parse_amd,
    parse_cpu_name,
    parse_device_tree,
    parse_nvidia_smi,
    parse_wired_limit,
)
from exo_mesh.machine.memory import MemoryReading, _read_cgroups, read_memory, tightest, usable_bytes
from exo_mesh.machine.this_machine import device
from exo_mesh.machine.tool_output import ask
from exo_mesh.node.inspection.describe import describe_peer
from exo_mesh.wire.control_codec import peer_from_proto, peer_to_proto
from tests.support.processes import eventually

MIB, GIB, GB = 2**20, 2**30, 10**9
SYSTEM = MemoryReading(64 * GIB, 50 * GIB, why="the system's memory")

TWO_CARDS = """0, NVIDIA GeForce RTX 4090, 24564, 507, 23576
1, NVIDIA GeForce RTX 4090, 24564, 459, 23624
"""
GB10 = "0, NVIDIA GB10, [N/A], [N/A], [N/A]\n"
"""A DGX Spark, driver 580: the GPU shares the system's memory."""
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n"
)


def usable(reading: MemoryReading, reserved: int = 0) -> int:
    return usable_bytes(reading, None, reserved, 0)


def test_nvidia_cards_are_read_in_their_order() -> None:
    first, second = parse_nvidia_smi(TWO_CARDS)
    assert first == NvidiaGpu(0, "NVIDIA GeForce RTX 4090", 24564 * MIB, 23576 * MIB)
    assert second.index == 1


@pytest.mark.parametrize("output", ["", NO_DRIVER, "No devices were found\n", "index, name\n", "a, b, c, d, e\n"])
def test_what_is_no_list_of_gpus_gives_none(output: str) -> None:
    assert parse_nvidia_smi(output) == ()


def test_a_name_may_hold_a_comma_and_a_driver_may_not_tell_what_is_free() -> None:
    (gpu,) = parse_nvidia_smi("3, Odd, Card, 8192, 1, [N/A]\n")
    assert gpu == NvidiaGpu(3, "Odd, Card", 8192 * MIB, 8191 * MIB)


def test_a_card_gives_what_is_free_but_never_more_than_nine_tenths() -> None:
    card = nvidia_reading(parse_nvidia_smi(TWO_CARDS), SYSTEM)
    assert card.total_bytes == 24564 * MIB
    assert usable(card) == int(0.9 * 24564 * MIB), "23576 MiB are free, which is more than nine tenths"
    assert usable(card, reserved=10 * GIB) == int(0.9 * 24564 * MIB) - 10 * GIB
    busy = nvidia_reading([NvidiaGpu(0, "card", 24564 * MIB, 5000 * MIB)], SYSTEM)
    assert usable(busy) == 5000 * MIB
    assert "GPU 0 of 2" in card.why and "NVIDIA's driver" in card.why


def test_a_gpu_without_memory_of_its_own_counts_the_systems() -> None:
    shared = nvidia_reading(parse_nvidia_smi(GB10), SYSTEM)
    assert usable(shared) == usable(SYSTEM) == 49 * GIB
    assert "NVIDIA GB10 shares" in shared.why


@pytest.mark.parametrize(
    ("value", "indices"), [("", [0, 1]), ("1", [1]), ("1,0", [1, 0]), ("7", []), ("GPU-8932f937", [0, 1])]
)
def test_gpus_are_those_that_an_engine_will_see(value: str, indices: list[int]) -> None:
    gpus = visible(parse_nvidia_smi(TWO_CARDS), {"CUDA_VISIBLE_DEVICES": value} if value else {})
    assert [gpu.index for gpu in gpus] == indices


def amd(vram: int, gtt: int, metrics: bytes = b"", vram_used: int = 0, gtt_used: int = 0) -> AmdGpu:
    values = (vram, vram_used, gtt, gtt_used)
    names = ("mem_info_vram_total", "mem_info_vram_used", "mem_info_gtt_total", "mem_info_gtt_used")
    gpu = parse_amd("gpu", {name: f"{value}\n" for name, value in zip(names, values, strict=True)}, metrics)
    assert gpu is not None
    return gpu


CARD, APU = b"\x80\x00\x01\x03", b"\x88\x00\x02\x04"
"""How gpu_metrics begins: its size, then its format revision, which is 1 on cards and 2 or 3 on APUs."""


def test_a_card_whose_gtt_is_as_large_as_its_memory_is_a_card() -> None:
    """An RX 570 with 4 GiB in a machine with 16 GB, as its driver printed it."""
    gpu = amd(4294967296, 4294967296, vram_used=1 * GIB)
    system = MemoryReading(16635121664, 10830524416)
    assert not gpu.is_apu(system.total_bytes)
    reading = amd_reading(gpu, system)
    assert (reading.total_bytes, usable(reading)) == (4 * GIB, 3 * GIB)


def test_a_card_that_maps_half_of_a_large_memory_is_a_card() -> None:
    assert not amd(8 * GIB, 32 * GIB).is_apu(64 * GIB)
    assert not amd(8 * GIB, 70 * GIB, CARD).is_apu(64 * GIB), "the driver says that it is one"


def test_an_apu_with_a_large_carve_out_admits_a_model_of_58_gb() -> None:
    """128 GB of which 64 are carved out, and GTT over all of the rest."""
    system = MemoryReading(64 * GB, 60 * GB)
    reading = amd_reading(amd(64 * GB, 64 * GB + 1), system)
    assert usable(reading) == int(0.9 * 64 * GB) + (60 - 16) * GB
    assert usable(reading) > 58.5 * GB
    assert usable(reading, reserved=100 * GB) == int(0.9 * 64 * GB) + (64 - 16) * GB - 100 * GB


def test_an_apu_that_its_driver_calls_one_needs_no_gtt_over_everything() -> None:
    """A Strix Halo with 128 GB, a carve-out of 4 GiB and GTT of 96 GiB, as its driver printed them."""
    system = MemoryReading(131 * GB, 125 * GB)
    shared, unsaid = amd(4294967296, 103079215104, APU), amd(4294967296, 103079215104)
    assert usable(amd_reading(shared, system)) == int(0.9 * 4 * GIB) + 103079215104
    assert usable(amd_reading(unsaid, system)) == int(0.9 * 4 * GIB), "without the driver's word it might be a card"
    assert "carve-out" in amd_reading(shared, system).why


def test_an_apu_on_a_full_machine_has_no_more_than_its_carve_out() -> None:
    system = MemoryReading(64 * GB, 10 * GB)
    assert usable(amd_reading(amd(2 * GB, 64 * GB, APU, vram_used=1 * GB), system)) == 1 * GB


def test_a_card_that_says_no_memory_is_none() -> None:
    assert parse_amd("gpu", {}) is None
    assert parse_amd("gpu", {"mem_info_vram_total": "0\n"}) is None


def test_amd_cards_are_found_where_linux_shows_them(tmp_path: Path) -> None:
    device = tmp_path / "card1" / "device"
    device.mkdir(parents=True)
    (device / "mem_info_vram_total").write_text("25753026560\n")
    (device / "mem_info_vram_used").write_text("27488256\n")
    (device / "mem_info_gtt_total").write_text("33439879168\n")
    (device / "device").write_text("0x744c\n")
    (device / "gpu_metrics").write_bytes(CARD + bytes(100))
    (tmp_path / "card1-DP-1").mkdir()
    (tmp_path / "card0" / "device").mkdir(parents=True)
    (found,) = read_amd(tmp_path)
    assert found == AmdGpu("AMD GPU 0x744c", 25753026560, 27488256, 33439879168, 0, integrated=False)
    assert read_amd(tmp_path / "nothing") == ()


def test_a_mac_gives_three_quarters_or_what_was_set() -> None:
    idle = MemoryReading(16 * GIB, 15 * GIB)
    assert usable(apple_reading(idle, None)) == 12 * GIB
    assert usable(apple_reading(idle, 14 * GIB)) == 14 * GIB
    assert usable(apple_reading(MemoryReading(16 * GIB, 6 * GIB), None)) == 5 * GIB
    assert (parse_wired_limit("26000\n"), parse_wired_limit("0\n"), parse_wired_limit("")) == (26000 * MIB, None, None)


def test_a_rockchip_board_is_known_by_its_device_tree() -> None:
    board = parse_device_tree(b"Radxa ROCK 5B\0", b"radxa,rock-5b\0rockchip,rk3588\0")
    assert board == Board("Radxa ROCK 5B", "rk3588")
    orange = parse_device_tree(b"Orange Pi 5\0", b"xunlong,orangepi-5\0rockchip,rk3588s\0")
    assert orange is not None and orange.chip == "rk3588"
    assert parse_device_tree(b"Raspberry Pi 5 Model B Rev 1.0\0", b"raspberrypi,5-model-b\0brcm,bcm2712\0") is None
    assert parse_device_tree(b"", b"") is None
    assert parse_device_tree(b"", b"radxa,rock-3a\0rockchip,rk3568\0") == Board("radxa,rock-3a", "rk3568")


@pytest.mark.parametrize(
    ("chip", "words"), [("rk3576", "NPU of the RK3576, 6 TOPS INT8"), ("rk3568", "NPU of the RK3568")]
)
def test_an_npu_is_described_with_its_speed_where_that_is_known(chip: str, words: str) -> None:
    npu = accelerator_for("npu", Machine("", board=Board("a board", chip)), SYSTEM)
    assert npu.name == f"a board: {words}"


def test_an_engines_compute_leads_to_its_device() -> None:
    board = Board("Radxa ROCK 5B", "rk3588")
    machine = Machine("AMD EPYC", nvidia=parse_nvidia_smi(TWO_CARDS), amd=(amd(8 * GIB, 8 * GIB),), board=board)
    found = {compute: accelerator_for(compute, machine, SYSTEM) for compute in ("cpu", "cuda", "rocm", "npu", "metal")}
    assert {name: one.kind for name, one in found.items()} == {
        "cpu": "cpu",
        "cuda": "gpu",
        "rocm": "gpu",
        "npu": "npu",
        "metal": "cpu",
    }
    assert found["npu"].memory.total_bytes == SYSTEM.total_bytes
    assert found["npu"].name == "Radxa ROCK 5B: NPU of the RK3588, 6 TOPS INT8"
    assert [one.kind for one in devices(machine, SYSTEM, ["cuda", "cuda"])] == ["gpu", "cpu"]


def test_vulkan_computes_on_the_card_that_there_is() -> None:
    nvidia, cards = parse_nvidia_smi(TWO_CARDS), (amd(8 * GIB, 8 * GIB),)
    both, one, none = (Machine("AMD EPYC", nvidia, cards), Machine("AMD EPYC", (), cards), Machine("AMD EPYC"))
    found = [accelerator_for("vulkan", machine, SYSTEM) for machine in (both, one, none)]
    assert [device.name for device in found] == [nvidia[0].name, cards[0].name, "AMD EPYC"]
    assert found[2].memory == SYSTEM


def test_a_peer_tells_the_others_its_device_and_why_so_much_of_it_is_usable() -> None:
    card = accelerator_for("cuda", Machine("AMD EPYC", nvidia=parse_nvidia_smi(TWO_CARDS)), SYSTEM)
    told = device(Registry({"dummy": dummy}, {}), "dummy", lambda compute: card)
    assert (told.kind, told.name, told.memory_bytes) == ("gpu", "NVIDIA GeForce RTX 4090", 24564 * MIB)
    peer = PeerInfo("id", 1, "name", "1", 1, "ns", (), devices=(told,))
    assert peer_from_proto(peer_to_proto(peer)).devices == (told,)
    assert describe_peer(peer).devices[0].why == card.memory.why != ""


def test_without_such_a_device_an_engine_has_the_systems_memory() -> None:
    assert accelerator_for("cuda", Machine("AMD EPYC"), SYSTEM).memory == SYSTEM


def test_processors_have_names() -> None:
    assert parse_cpu_name("processor\t: 0\nmodel name\t: AMD  Ryzen 9 5950X\n") == "AMD Ryzen 9 5950X"
    assert parse_cpu_name("processor\t: 0\nCPU implementer\t: 0x41\n") == ""
    assert read_machine().cpu


def test_this_machines_memory_is_that_of_the_system_or_of_its_control_group() -> None:
    reading = read_memory()
    assert 0 < reading.available_bytes <= reading.total_bytes
    assert reading.why


def test_a_control_group_is_tighter_than_the_system() -> None:
    assert tightest(SYSTEM, []) == SYSTEM
    limited = tightest(SYSTEM, [(8 * GIB, 3 * GIB), (100 * GIB, 1 * GIB)])
    assert (limited.total_bytes, limited.available_bytes) == (8 * GIB, 5 * GIB)
    assert "control group" in limited.why
    assert tightest(SYSTEM, [(8 * GIB, 9 * GIB)]).available_bytes == 0


def test_every_control_group_above_a_process_counts_and_its_file_cache_does_not(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/system.slice/exo-mesh.service\n")
    root = tmp_path / "cgroup"
    service = root / "system.slice" / "exo-mesh.service"
    service.mkdir(parents=True)
    (service / "memory.max").write_text("8000\n")
    (service / "memory.current").write_text("3000\n")
    (service / "memory.stat").write_text("anon 1000\ninactive_file 1900\nactive_file 100\n")
    (root / "system.slice" / "memory.max").write_text("max\n")
    (root / "system.slice" / "memory.current").write_text("5000\n")
    (root / "memory.max").write_text("9000\n")
    (root / "memory.current").write_text("6000\n")
    assert list(_read_cgroups(root, own)) == [(8000, 1100), (9000, 6000)]


def test_control_groups_of_the_first_version_are_read_in_a_container(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("5:devices:/docker/1\n4:memory,hugetlb:/docker/1\n0::/\n")
    memory = tmp_path / "cgroup" / "memory"
    memory.mkdir(parents=True)  # the path of the host does not exist inside
    (memory / "memory.limit_in_bytes").write_text("8000\n")
    (memory / "memory.usage_in_bytes").write_text("3000\n")
    (memory / "memory.stat").write_text("total_inactive_file 500\n")
    assert list(_read_cgroups(tmp_path / "cgroup", own)) == [(8000, 2500)]


def test_a_tool_that_is_not_there_fails_or_hangs_says_nothing() -> None:
    assert ask(["no-such-tool-anywhere"]) == ""
    assert ask([sys.executable, "-c", "print('x'); raise SystemExit(9)"]) == ""
    assert ask([sys.executable, "-c", "input()"], 5.0) == "", "it got no standard input to wait for"
    assert ask([sys.executable, "-c", "import time; print('x', flush=True); time.sleep(60)"], 0.3) == ""


def test_the_memory_of_a_card_is_followed_by_a_thread_and_a_call_never_waits() -> None:
    """The driver blocks in the second reading, as drivers do; calls go on answering with the first."""
    blocked, go_on = threading.Event(), threading.Event()
    readings = iter([23576, 1000])

    def read() -> Machine:
        free = next(readings, 1000)
        if free == 1000:
            blocked.set()
            assert go_on.wait(30)
        return Machine("cpu", nvidia=[NvidiaGpu(0, "card", 24564 * MIB, free * MIB)])

    memory = DeviceMemory(lambda: SYSTEM, read, poll_s=0.001)
    assert memory() == SYSTEM
    assert memory.follow("cuda").name == "card"
    assert blocked.wait(30)
    assert memory().available_bytes == 23576 * MIB
    go_on.set()
    assert eventually(lambda: memory().available_bytes == 1000 * MIB)
    memory.close()


def test_a_driver_that_stops_answering_leaves_nothing_free() -> None:
    there = [NvidiaGpu(0, "card", 24564 * MIB, 20000 * MIB)]
    asked = 0

    def read() -> Machine:
        nonlocal asked
        asked += 1
        return Machine("cpu", nvidia=there if asked == 1 else ())

    memory = DeviceMemory(lambda: SYSTEM, read, poll_s=0.001)
    memory.follow("cuda")
    assert eventually(lambda: memory().available_bytes == 0)
    assert asked > STALE_READINGS
    assert "no longer answers" in memory().why
    memory.close()


def test_the_systems_memory_needs_no_thread() -> None:
    before = threading.active_count()
    memory = DeviceMemory(lambda: SYSTEM, lambda: Machine("AMD EPYC"))
    assert memory.follow("cpu").name == "AMD EPYC"
    assert memory() == SYSTEM
    assert threading.active_count() == before
    memory.close()

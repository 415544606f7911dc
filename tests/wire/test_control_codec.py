"""What peers tell each other of plans and of themselves arrives as it was."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from exo_mesh.domain import device as limits
from exo_mesh.domain.device import Device, EngineInfo, EntryRequests, HopReading, PeerInfo, Telemetry
from exo_mesh.domain.download import DownloadInfo, DownloadState
from exo_mesh.domain.plan import NO_BALLOT, Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.power import AcceleratorReading, DeviceValues, HardwareReading
from exo_mesh.domain.shard import MAX_KEPT, KeptLayers, Shard
from exo_mesh.domain.view import MAX_CARD_BYTES, CardInfo, ForeignInfo, InstanceInfo, InstanceState, Record, RecordKey
from exo_mesh.wire import control_codec as codec
from exo_mesh.wire.plan_codec import plan_from_proto, plan_to_proto
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto import plan_pb2

STAGES = (StagePlan("a", "mlx", Shard("m", 0, 3, 8), 5), StagePlan("b", "mlx", Shard("m", 3, 8, 8), 7))
PLAN = Plan("m-1", Ballot(4, "a"), "m", "d", STAGES, 2048, PlanInputs((("a", 9), ("b", 8)), "memory", 2), 8192)


def test_a_plan_keeps_its_pool_and_its_digest() -> None:
    there = plan_from_proto(plan_to_proto(PLAN))
    assert there == PLAN and there.digest == PLAN.digest and there.pool_tokens == 8192


def test_a_mixed_plan_keeps_what_its_stages_agreed_on() -> None:
    mixed = replace(PLAN, activation_dtype="bfloat16", pool_sequences=8)
    there = plan_from_proto(plan_to_proto(mixed))
    assert there == mixed and there.digest != PLAN.digest


def test_a_peer_keeps_what_it_says_of_its_engines() -> None:
    details = (EngineInfo("mlx", "metal", "mlx 1", ("float32", "bfloat16")), EngineInfo("numpy", "cpu", "2"))
    device = Device("gpu", "M4", ("mlx", "numpy"), "mlx", 10, details)
    models = (("m", ("mlx", "numpy")), ("n", ()))
    info = PeerInfo("p", 1, "n", "1", 2, "default", ("a:1",), "", (device,), ("m", "n"), models)
    there = codec.peer_from_proto(codec.peer_to_proto(info))
    assert there == info and there.tags == info.tags


def test_a_peer_keeps_what_it_says_of_its_files() -> None:
    info = PeerInfo(
        "p", 1, "n", "1", 2, "default", ("a:1",), fetches="hub", files_port=7000, partial_models=("m",), has_store=True
    )
    there = codec.peer_from_proto(codec.peer_to_proto(info))
    assert there == info and there.knows("m") and not there.knows("n")


def test_a_peer_keeps_what_it_says_of_its_disk_and_cannot_fill_another_with_it() -> None:
    kept = (KeptLayers("mlx", 3, 8, 2048, "bfloat16", 1, 2, (0, 7, 2**64 - 1)), KeptLayers("", 0, 3))
    info = PeerInfo("p", 1, "n", "1", 2, "default", (), on_disk=(("d" * 32, kept),))
    there = codec.peer_from_proto(codec.peer_to_proto(info))
    assert there == info and there.kept_of("d" * 64) == kept and there.kept_of("e" * 64) == ()
    message = codec.peer_to_proto(info)
    message.on_disk[0].layers.add(start=5, stop=5)
    message.on_disk[0].layers.add(start=0, stop=1, rank=2, size=2)
    message.on_disk[0].layers[1].keys.append(5)
    many = plan_pb2.KeptLayers(start=0, stop=1, tokens=1, keys=[9, 9, 3, 4, 5])
    ordered = codec.peer_from_proto(pb.PeerInfo(id="p", on_disk=[pb.ModelOnDisk(digest="d", layers=[many])]))
    assert ordered.on_disk[0][1][0].keys == (3, 4, 9), "at most MAX_KEYS, in order, each once"
    for number in range(100):
        one = message.on_disk.add(digest=f"{number}\n" + "x" * 99)
        one.layers.extend([plan_pb2.KeptLayers(engine="e" * 99, start=0, stop=1)] * 100)
    found = codec.peer_from_proto(message).on_disk
    assert len(found) == limits.MAX_MODELS and found[0][1] == kept, "impossible layers are left out"
    assert len(found[1][0]) == 32 and "\n" not in found[1][0]
    assert len(found[1][1]) == MAX_KEPT and len(found[1][1][0].engine) == 64


def test_a_plan_keeps_what_it_was_solved_from() -> None:
    on_disk = (("a", (KeptLayers("mlx", 0, 4, 512),)), ("b", (KeptLayers("", 4, 8),)))
    plan = replace(PLAN, inputs=replace(PLAN.inputs, on_disk=on_disk))
    there = plan_from_proto(plan_to_proto(plan))
    assert there == plan and there.digest == PLAN.digest, "older versions do not know it, and have the same digest"


@pytest.mark.parametrize("state", DownloadState)
def test_a_download_keeps_its_figures(state: DownloadState) -> None:
    info = DownloadInfo("m", state, 5, 10, 2.5, 2.0, (3, 8), True, "no room", "make room", 4, 1)
    record = Record(RecordKey("download", "m", "a"), 3, info)
    assert codec.record_from_proto(codec.record_to_proto(record)).value == record.value


def test_a_peer_cannot_fill_another_with_engines() -> None:
    details = tuple(EngineInfo(str(n), "cpu") for n in range(3 * limits.MAX_ENGINES))
    models = tuple((str(n), tuple(map(str, range(99)))) for n in range(2 * limits.MAX_ITEMS))
    device = Device("cpu", "x", (), "", 1, details)
    info = PeerInfo("p", 1, "n", "1", 2, "default", (), devices=(device,), model_engines=models)
    there = codec.peer_from_proto(codec.peer_to_proto(info))
    assert len(there.devices[0].details) == limits.MAX_ENGINES and len(there.model_engines) == limits.MAX_ITEMS
    assert all(len(engines) == limits.MAX_ENGINES for _, engines in there.model_engines)


@pytest.mark.parametrize("adopted", [NO_BALLOT, Ballot(5, "b")])
def test_an_instance_keeps_the_ballot_by_which_it_was_adopted(adopted: Ballot) -> None:
    info = InstanceInfo(PLAN, InstanceState.READY, ("x:1", "y:2"), (10, 11), "", adopted, is_auto=True)
    there = codec.instance_from_proto(codec.instance_to_proto(info))
    assert there == info and there.ballot == max(PLAN.ballot, adopted)


def test_a_model_card_arrives_as_it_was_and_a_long_one_is_not_read() -> None:
    key = RecordKey("card", "org/name", "a")
    record = Record(key, 3, CardInfo("x" * MAX_CARD_BYTES))
    assert codec.record_from_proto(codec.record_to_proto(record)).value == record.value
    longer = codec.record_to_proto(Record(key, 3, CardInfo("x" * (MAX_CARD_BYTES + 100))))
    no_text = codec.record_to_proto(record)
    no_text.card.toml = b"\xff"
    for message in (longer, no_text):
        assert isinstance(codec.record_from_proto(message).value, ForeignInfo)


def test_telemetry_keeps_speeds_and_tokens() -> None:
    hops = (HopReading("b", 0.5, 940.0, "ethernet"),)
    reading = Telemetry(
        "a", 3, 10, 20, 5, 0.5, {"mlx": 0.25}, {"m-1": 77}, capacity_bytes=18, headroom_bytes=-3,
        temperature_c=61.5, power_w=45.0, frames={"m-1": 80}, is_draining=True, hops=hops,
        waiting={"m-1": 3}, slots={"m-1": 4},
    )  # fmt: skip
    assert codec.telemetry_from_proto(codec.telemetry_to_proto(reading)) == reading


def test_telemetry_keeps_what_the_hardware_says_and_where_that_comes_from() -> None:
    machine = DeviceValues.of("rapl+nvml", power_w=311.25, energy_j=12345.5).merged(
        DeviceValues.of("system", utilization=0.0)
    )
    gpu = DeviceValues.of("nvml", utilization=0.25, memory_used_bytes=5, memory_total_bytes=9, clock_hz=1.5e9)
    card = AcceleratorReading("gpu0", "gpu", "nvidia", "H100", gpu)
    hardware = HardwareReading(machine, (card,), 2**64 - 1)
    entry = EntryRequests({"m-1": 2}, frozenset({"m-2"}))
    reading = Telemetry("a", 3, 10, 20, 5, hardware=hardware, prompt_tokens={"m-1": 9}, entry_requests=entry)
    assert codec.telemetry_from_proto(codec.telemetry_to_proto(reading)) == reading
    assert codec.telemetry_to_proto(Telemetry("a", 3, 10, 20, 5)).ByteSize() < 20, "no hardware, no bytes"


def test_what_a_peer_says_of_its_hardware_is_bounded_and_plausible() -> None:
    message = pb.Telemetry(peer_id="a")
    values = pb.DeviceValues(power_w=math.nan, temperature_c=-4.0, energy_j=math.inf, utilization=0.5)
    values.sources.extend([pb.ValueSource(source="s" * 999, values=0xFFFF)] * 99)
    card = pb.AcceleratorReading(id="g" * 999, name="n" * 999, values=values)
    message.hardware.accelerators.extend([card] * 99)
    there = codec.telemetry_from_proto(message).hardware.accelerators
    assert len(there) == 32 and len(there[0].name) == 128
    assert there[0].values.describe() == {"utilization": 0.5, "sources": {"utilization": "s" * 64}}


def test_a_peer_cannot_fill_another_with_readings() -> None:
    many = {f"m-{n}": n for n in range(3 * limits.MAX_ITEMS)}
    entry = EntryRequests(many, frozenset(many))
    reading = Telemetry("a", 1, 1, 1, 0, 0.0, {}, many, frames=many, entry_requests=entry, waiting=many, slots=many)
    message = codec.telemetry_to_proto(reading)
    message.hops.extend([pb.HopReading(peer_id="p" * 1000)] * 1000)
    there = codec.telemetry_from_proto(message)
    assert len(there.tokens) == len(there.frames) == limits.MAX_ITEMS
    assert len(there.waiting) == len(there.slots) == limits.MAX_ITEMS
    assert there.entry_requests is not None and len(there.entry_requests.running) == limits.MAX_ITEMS
    assert len(there.entry_requests.awaited) == limits.MAX_ITEMS
    assert len(there.hops) == limits.MAX_HOPS and len(there.hops[0].peer_id) == 64

"""A mesh in which every field of /state and /v1/topology has a value in some place: peers of several kinds, a tensor
group, an instance that downloads, one that failed, cables, hardware, links measured here and by others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from exo_mesh.domain.addresses import LinkKind, Path
from exo_mesh.domain.device import Device, EngineInfo, HopReading, PeerInfo, RdmaPort, StaticRank, Telemetry
from exo_mesh.domain.download import DownloadInfo, DownloadState
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.power import AcceleratorReading, DeviceValues, HardwareReading
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor_group import TensorGroup
from exo_mesh.domain.view import InstanceInfo, InstanceState, Record, RecordKey, View
from exo_mesh.domain.whole.served import ServedModel


def _peer(name: str, **more: Any) -> PeerInfo:
    engine = EngineInfo("mlx", "metal", "0.32", ("float16", "bfloat16"))
    device = Device("metal", "M3 Ultra", ("mlx", "dummy"), "mlx", 24, (engine,), 512 * 10**9, "all of it")
    return PeerInfo(name, 7, f"name of {name}", "1.2", 5, "default", (f"10.0.0.{ord(name)}:5000",), "http://x:1",
                    (device,), **more)  # fmt: skip


def _ports(own: str, other: str) -> tuple[RdmaPort, ...]:
    return (RdmaPort("rdma_en5", True, f"{own}-{other}", f"{other}-{own}", "80 Gb/s", 4),)


def _instance(name: str, stages: tuple[StagePlan, ...], state: InstanceState, **more: Any) -> InstanceInfo:
    inputs = PlanInputs((("a", 10**9), ("b", 2 * 10**9)), "memory", 1)
    plan = Plan(name, Ballot(3, "a"), "org/m", "d" * 64, stages, 4096, inputs, 8192, "float16", 8)
    return InstanceInfo(plan, state, **more)


def rich_view() -> View:
    group = TensorGroup("jaccl", ("a", "b"), ((None, "rdma_en5"), ("rdma_en5", None)))
    two = (
        StagePlan("a", "mlx", Shard("org/m", 0, 4, 6), 100, group),
        StagePlan("c", "torch", Shard("org/m", 4, 6, 6), 200),
    )
    one = (StagePlan("c", "torch", Shard("org/m", 0, 6, 6), 300),)
    download = DownloadInfo("org/m", DownloadState.ONGOING, 25, 100, 5.5, 15.0)
    rank = StaticRank("g", 1, 2, "jaccl", (None, "rdma_en5"))
    served = ServedModel("served", "openai", "127.0.0.1:8000", "served-1", "org/m", 2048, 2)
    values: dict[tuple[str, str, str], Any] = {
        ("peer", "a", "a"): _peer("a", rdma_ports=_ports("a", "b"), models=("org/m",)),
        ("peer", "b", "b"): _peer("b", rdma_ports=_ports("b", "a"), static_rank=rank, served=(served,)),
        ("peer", "c", "c"): _peer("c", role="edge", model_engines=(("org/m", ("torch", "mlx")),), fetches="all",
                                  partial_models=("org/n",), unverified=("org/m",)),
        ("instance", "m-1", "a"): _instance("m-1", two, InstanceState.READY, endpoints=("x:1", "y:2"), pids=(11, 12)),
        ("instance", "m-2", "b"): _instance("m-2", two, InstanceState.LOADING, is_auto=True, adopted=Ballot(4, "b")),
        ("instance", "m-3", "c"): _instance("m-3", one, InstanceState.FAILED, reason="stage 0: boom"),
        ("download", "org/m", "c"): download,
        ("download", "org/n", "b"): DownloadInfo("org/n", DownloadState.FAILED, reason="no room"),
    }  # fmt: skip
    view = View()
    view.merge([Record(RecordKey(*key), 1, value) for key, value in values.items()], 0.0)
    return view


def rich_readings() -> dict[str, Telemetry]:
    card = DeviceValues.of("nvml", utilization=0.5, power_w=212.25, temperature_c=61.0, memory_used_bytes=6 * 10**9)
    machine = DeviceValues.of("rapl", energy_j=10.55, clock_hz=2.4e9)
    hardware = HardwareReading(machine, (AcceleratorReading("gpu0", "gpu", "nvidia", "RTX 4090", card),))
    return {
        "a": Telemetry("a", 1, 10, 30, 20, 0.123, {"mlx": 0.0123456789}, {"m-1": 5}, headroom_bytes=9,
                       frames={"m-1": 7}, temperature_c=55.55, power_w=33.33, fetch_room_bytes=77),
        "b": Telemetry("b", 1, 11, 31, 21, hardware=hardware, is_draining=True,
                       hops=(HopReading("c", 0.4, 900.0, "ethernet"), HopReading("a"))),
        "c": Telemetry("c", 1, 12, 32, 22),
    }  # fmt: skip


def rich_membership() -> Any:
    """What the topology reads of a membership: peer a is this node, which has measured two paths to b."""
    used = Path("10.0.0.98:5000", LinkKind.THUNDERBOLT, 0.12345, 3000.4567, 1700000000.5)
    paths = {path.address: path for path in (used, Path("10.1.0.98:5000", LinkKind.WIFI, failed=True))}
    known = SimpleNamespace(id="b", client=SimpleNamespace(address=used.address), paths=paths, rtt_ms=1.5)
    new = SimpleNamespace(id="c", client=SimpleNamespace(address="10.0.0.99:5000"), paths={}, rtt_ms=2.25)
    return SimpleNamespace(
        own=SimpleNamespace(id="a"), view=rich_view(), telemetry=rich_readings(), peers=[known, new],
        refusals=["10.0.0.9: another namespace"],
    )  # fmt: skip


def rich_instances() -> Any:
    return SimpleNamespace(all=lambda: rich_view().instances(), phases=lambda instance_id: ())

"""States of meshes as /state shows them: what the page draws, for one to many peers."""

from __future__ import annotations

from typing import Any

from exo_mesh.domain.reports import StateReport
from tests.support.reports import report_of

GB = 10**9
NAMES = ("studio-1", "studio-2", "linux-gpu", "laptop", "board-3588", "mini-1", "mini-2", "workshop-tower")
ENGINES = ("mlx", "mlx", "torch", "torch", "dummy", "mlx", "mlx", "torch")
LAYERS = 60


def peer_id(index: int) -> str:
    return f"{index:x}" * 32


def mesh_state(
    num_peers: int,
    *,
    group: int = 0,
    lost: bool = False,
    state: str = "ready",
    stages: bool = True,
    fetched: float | None = None,
) -> StateReport:
    """num_peers peers, of which all but the last of more than three hold layers of one model. group: so many of the
    first peers are one tensor group. lost: the second peer is gone. state: of the instance. stages: False without a
    model. fetched: the share that the first peer has of a running download."""
    ids = [peer_id(index) for index in range(num_peers)]
    alive = [one for index, one in enumerate(ids) if not (lost and index == 1)]
    held = _stages(ids[: num_peers - 1 if num_peers > 3 else num_peers], group) if stages else []
    health = {
        "status": "ok", "level": "ok", "reasons": [], "instance_health": [],
        "peer_health": [_health(ids.index(one), is_hot=len(ids) > 2 and one == ids[2]) for one in alive],
    }  # fmt: skip
    if lost:
        health["peer_health"].append(_lost(1))
    links = [_link(ids[0], other, index) for index, other in enumerate(alive[1:])]
    return report_of(
        StateReport,
        node_id=ids[0],
        view={
            "peers": [_peer(ids.index(one)) for one in alive],
            "instances": [_instance(held, state)] if held else [],
            "downloads": [] if fetched is None else [_download(fetched)],
            "view_digest": "d",
        },
        telemetry={one: _reading(ids.index(one), ids, held) for one in alive},
        links=links,
        cables=[],
        stages_here={},
        health=health,
    )


def _download(share: float) -> dict[str, Any]:
    return {"model": "org/big-70b", "peer": peer_id(0), "state": "ongoing", "done_bytes": int(40 * GB * share),
            "total_bytes": 40 * GB, "bytes_per_s": 1e8, "eta_s": 300.0, "reason": ""}  # fmt: skip


def _peer(index: int) -> dict[str, Any]:
    engine = ENGINES[index]
    device = {"kind": "metal" if engine == "mlx" else "cpu", "name": "a machine", "engines": [engine], "engine": engine,
              "cores": 8, "memory_bytes": 64 * GB, "why": ""}  # fmt: skip
    return {"id": peer_id(index), "name": NAMES[index], "alive": True, "version": "1.0", "addresses": [],
            "api_url": f"http://10.0.0.{index}:52415", "devices": [device], "models": ["big-70b"],
            "partial_models": [], "fetches": "hub"}  # fmt: skip


def _reading(index: int, ids: list[str], stages: list[dict[str, Any]]) -> dict[str, Any]:
    total = (192, 128, 24, 16, 8, 64, 64, 256)[index] * GB
    reserved = int(total * 0.4)
    onward = ids[(index + 1) % len(ids)]
    hops = (
        [{"to": onward, "rtt_ms": 0.3 + index, "mb_per_s": 900.0, "kind": "ethernet"}] if onward != ids[index] else []
    )
    driver = bool(stages) and stages[-1]["peer"] == ids[index]
    return {"usable_bytes": int(total * (0.5 - 0.05 * index)), "total_bytes": total, "reserved_bytes": reserved,
            "load": 0.5 * index, "temperature_c": 40.0 + 5 * index if index % 3 != 2 else None,
            "power_w": 30.0 * index or None,
            "hardware": {"machine": {"sources": {}}, "accelerators": _gpus(index)},
            "tokens": {"big-70b-1": 100} if driver else {},
            "frames": {"big-70b-1": 120} if driver else {}, "draining": index == 3, "hops": hops}  # fmt: skip


def _gpus(index: int) -> list[dict[str, Any]]:
    """Every third peer has a card; the second of them does not say what it draws."""
    if index % 3 != 1:
        return []
    known = {"utilization": 0.5, "memory_used_bytes": 6 * GB, "memory_total_bytes": 24 * GB, "temperature_c": 61.0}
    power = {"power_w": 212.0} if index == 1 else {}
    card = {"id": "gpu0", "kind": "gpu", "vendor": "nvidia", "name": "RTX 4090", **known, **power}
    return [{**card, "sources": dict.fromkeys([*known, *power], "nvml")}]


def _stages(ids: list[str], group: int) -> list[dict[str, Any]]:
    members = [ids[:group], *([one] for one in ids[group:])] if group else [[one] for one in ids]
    bounds = [LAYERS * index // len(members) for index in range(len(members) + 1)]
    stages: list[dict[str, Any]] = []
    for index, peers in enumerate(members):
        stage = {"peer": peers[0], "engine": ENGINES[index], "layers": bounds[index : index + 2], "reserve_bytes": GB}
        if len(peers) > 1:
            stage["group"] = {"peers": peers, "backend": "jaccl", "rdma": []}
        stages.append(stage)
    return stages


def _instance(stages: list[dict[str, Any]], state: str) -> dict[str, Any]:
    return {"id": "big-70b-1", "model": "org/big-70b", "state": state, "reason": "", "owner": peer_id(0),
            "ballot": [1, peer_id(0)], "context_limit": 8192, "kv_pool_tokens": 16384, "policy": "memory",
            "stages": stages}  # fmt: skip


def _link(own: str, other: str, index: int) -> dict[str, Any]:
    path = {"address": "10.0.0.9:5000", "kind": "ethernet", "rtt_ms": 0.4, "mb_per_s": 940.0, "works": True}
    return {"from": own, "to": other, "address": "10.0.0.9:5000", "rtt_ms": 0.4 + index, "mb_per_s": 940.0,
            "paths": [path]}  # fmt: skip


def _health(index: int, *, is_hot: bool) -> dict[str, Any]:
    reason = {"code": "memory_pressure", "level": "degraded",
              "message": "91 % of this machine's memory are in use, critical are 90 %",
              "remedy": "end other programs on it, or lower --max-memory"}  # fmt: skip
    reasons = [reason] if is_hot else []
    return {"id": peer_id(index), "name": NAMES[index], "level": "degraded" if is_hot else "ok", "reasons": reasons}


def _lost(index: int) -> dict[str, Any]:
    reason = {"code": "unreachable", "level": "failed", "message": "it has not answered for 4 s",
              "remedy": "see whether it runs and is connected"}  # fmt: skip
    return {"id": peer_id(index), "name": NAMES[index], "level": "failed", "reasons": [reason]}

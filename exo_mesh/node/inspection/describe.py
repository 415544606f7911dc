"""Describes this node and the mesh as plain JSON values: numbers and names only, no prompt and no token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from exo_mesh.domain.device import Device, HopReading, PeerInfo, Telemetry
from exo_mesh.domain.download import DownloadInfo
from exo_mesh.domain.rdma_links import cables
from exo_mesh.domain.view import InstanceInfo, InstanceState, View
from exo_mesh.errors import MemoryPressureError
from exo_mesh.mesh.membership.links import hops_of_others
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting.status_board import StageBeat
from exo_mesh.rings.placing.instances import Instances
from exo_mesh.wire.proto.runner_pb2 import Heartbeat


def describe_instance(
    instance: InstanceInfo, owner: str, downloads: Iterable[tuple[str, DownloadInfo]] = ()
) -> dict[str, Any]:
    """An instance as in `state()["view"]["instances"]`. downloads: (peer id, download) pairs of the view; while the
    instance is loading, each stage lists the downloads of its peers."""
    plan = instance.plan
    stages = plan.describe()
    for index, stage in enumerate(stages):
        stage["endpoint"] = instance.endpoints[index] if instance.endpoints else None
        stage["pid"] = instance.pids[index] if instance.pids else None
        if instance.state is InstanceState.LOADING:
            peers, model = plan.stages[index].peers, plan.model
            mine = [(peer_id, one) for peer_id, one in downloads if peer_id in peers and one.model == model]
            stage["downloads"] = [describe_download(peer_id, one) for peer_id, one in mine]
    return {
        "id": plan.instance_id,
        "model": plan.model,
        "model_digest": plan.model_digest,
        "state": str(instance.state),
        "reason": instance.reason,
        "automatic": instance.is_auto,
        "owner": owner,
        "ballot": [instance.ballot.counter, instance.ballot.proposer],
        "digest": plan.digest,
        "context_limit": plan.context_limit,
        "kv_pool_tokens": plan.kv_tokens,
        "policy": plan.inputs.policy,
        "activation_dtype": plan.activation_dtype,
        "stages": stages,
    }


def describe_download(owner: str, info: DownloadInfo) -> dict[str, Any]:
    return {
        "peer": owner,
        "state": str(info.state),
        "done_bytes": info.done_bytes,
        "total_bytes": info.total_bytes,
        "bytes_per_s": info.bytes_per_s,
        "eta_s": info.eta_s,
        "reason": info.reason,
    }


def peers_of(stage: Mapping[str, Any]) -> list[str]:
    """The ids of all peers of a stage from `describe_instance`."""
    peers: list[str] = stage["group"]["peers"] if "group" in stage else [stage["peer"]]
    return peers


def describe_device(device: Device) -> dict[str, Any]:
    return {
        "kind": device.kind,
        "name": device.name,
        "engines": list(device.engines),
        "engine": device.engine,
        "cores": device.cores,
        "memory_bytes": device.memory_bytes,
        "why": device.why,
    }


def describe_peer(peer: PeerInfo) -> dict[str, Any]:
    return {
        "id": peer.id,
        "name": peer.name,
        "role": peer.role,
        "alive": True,
        "incarnation": peer.incarnation,
        "version": peer.version,
        "addresses": list(peer.addresses),
        "api_url": peer.api_url,
        "devices": [describe_device(device) for device in peer.devices],
        "tags": list(peer.tags),
        "engine_versions": {info.name: info.version for device in peer.devices for info in device.details},
        "models": list(peer.models),
        "partial_models": list(peer.partial_models),
        "unverified": list(peer.unverified),
        "fetches": peer.fetches,
        "model_engines": {model: list(engines) for model, engines in peer.model_engines},
        "rdma_ports": [asdict(port) for port in peer.rdma_ports],
        "served": [asdict(one) for one in peer.served],
        "static_rank": None if peer.static_rank is None else asdict(peer.static_rank),
    }


def describe_view(view: View) -> dict[str, Any]:
    """The shared view, which is equal on all live peers. Its digest does not cover downloads."""
    downloads = view.downloads()
    return {
        "peers": [describe_peer(peer) for peer in view.peers()],
        "instances": [describe_instance(instance, owner, downloads) for owner, instance in view.instances()],
        "downloads": [{"model": one.model, **describe_download(owner, one)} for owner, one in downloads],
        "view_digest": view.digest(),
    }


def describe_telemetry(reading: Telemetry) -> dict[str, Any]:
    return {
        "usable_bytes": reading.usable_bytes,
        "total_bytes": reading.total_bytes,
        "reserved_bytes": reading.reserved_bytes,
        "headroom_bytes": reading.headroom_bytes,
        "load": round(reading.load, 2),
        "s_per_gb": {engine: round(seconds, 6) for engine, seconds in sorted(reading.s_per_gb.items())},
        "tokens": dict(sorted(reading.tokens.items())),
        "fetch_room_bytes": reading.fetch_room_bytes,
        "temperature_c": round(reading.temperature_c, 1) or None,
        "power_w": round(reading.power_w, 1) or None,
        "hardware": reading.hardware.describe(),
        "frames": dict(sorted(reading.frames.items())),
        "draining": reading.is_draining,
        "hops": [
            {"to": hop.peer_id, "rtt_ms": hop.rtt_ms or None, "mb_per_s": hop.mb_per_s or None, "kind": hop.kind}
            for hop in reading.hops
        ],
    }


def describe_stage_memory(stage: StageBeat) -> dict[str, Any]:
    """The memory of a stage. Only the driver reports the KV pool, in token positions; each stage of its ring holds
    these positions for its own layers."""
    shown: dict[str, Any] = {
        "instance": stage.instance_id,
        "stage": stage.index,
        "memory_bytes": stage.beat.memory_bytes,
        "sequences": stage.beat.sequences,
        "library": _describe_library(stage.beat),
        "prefix_cache": {"sequences": stage.beat.prefix.kept, "bytes": stage.beat.prefix.bytes},
    }
    if stage.num_ranks > 1:
        shown["group"] = {"rank": stage.rank, "ranks": stage.num_ranks, "kv_heads": stage.kv_heads or None}
    figures = stage.beat.prefix
    if figures.has_disk:
        shown["prefix_cache"]["disk"] = {
            "files": figures.disk_files,
            "bytes": figures.disk_bytes,
            "writes": figures.disk_writes,
            "errors": figures.disk_errors,
            "problem": figures.disk_problem or None,
        }
    if stage.is_driver:
        shown["prefix_cache"] |= {
            "on": figures.is_on,
            "tokens": figures.kept_tokens,
            "hits": figures.hits,
            "misses": figures.misses,
            "hit_tokens": figures.hit_tokens,
            "evictions": figures.evictions,
        }
        if figures.has_disk:
            shown["prefix_cache"]["disk"] |= {
                "on": figures.disk_is_on,
                "known": figures.disk_known,
                "hits": figures.disk_hits,
                "hit_tokens": figures.disk_hit_tokens,
                "lost": figures.disk_misses,
            }
        shown["kv_tokens"] = stage.beat.kv_tokens
        shown["kv_pool_tokens"] = stage.beat.kv_pool_tokens
        shown["evictions"] = stage.beat.evictions
    return shown


def _describe_library(beat: Heartbeat) -> dict[str, Any] | None:
    """The memory that the engine's library reports to use; None if it does not report."""
    if not beat.HasField("library"):
        return None
    library = beat.library
    return {
        "source": library.source,
        "active_bytes": library.active_bytes,
        "cache_bytes": library.cache_bytes,
        "peak_bytes": library.peak_bytes,
        "limit_bytes": library.limit_bytes if library.HasField("limit_bytes") else None,
    }


def describe_peer_memory(peer: PeerInfo, reading: Telemetry) -> dict[str, Any]:
    return {
        "id": peer.id,
        "name": peer.name,
        "total_bytes": reading.total_bytes,
        "usable_bytes": reading.usable_bytes,
        "reserved_bytes": reading.reserved_bytes,
        "capacity_bytes": reading.capacity_bytes,
        "headroom_bytes": reading.headroom_bytes,
        "short": [reason.message for reason in reading.reasons if reason.code == MemoryPressureError.code],
    }


def describe_beat(beat: Heartbeat) -> dict[str, Any]:
    """The counters of a stage on this machine."""
    return {
        "frames_in": beat.frames_in,
        "frames_out": beat.frames_out,
        "bytes_out": beat.bytes_out,
        "sequences": beat.sequences,
        "memory_bytes": beat.memory_bytes,
        "queued": beat.queued,
        "running": beat.running,
        "tokens": beat.tokens,
        "linked": beat.linked,
        "busy_s": beat.busy_s,
        "laps": beat.laps,
        "lap_p50_s": beat.lap_p50_s,
        "lap_p99_s": beat.lap_p99_s,
    }


def describe_link(own_id: str, peer: Peer) -> dict[str, Any]:
    """The link from this node to a peer, with the measurements of each known path.

    rtt_ms: measured for the address in use; until then, of the last exchanges. mb_per_s: 10^6 bytes per second, of one
    transfer of 256 KiB at the time mb_per_s_at (Unix seconds).
    """
    used = peer.paths.get(peer.client.address)
    return {
        "from": own_id,
        "to": peer.id,
        "address": peer.client.address,
        "rtt_ms": _rounded(used.rtt_ms if used is not None and used.works else peer.rtt_ms),
        "mb_per_s": _rounded(used.mb_per_s) if used is not None else None,
        "mb_per_s_at": used.mb_per_s_at if used is not None else None,
        "paths": [
            {
                "address": path.address,
                "kind": path.kind.name.lower(),
                "rtt_ms": _rounded(path.rtt_ms),
                "mb_per_s": _rounded(path.mb_per_s),
                "mb_per_s_at": path.mb_per_s_at,
                "works": path.works,
            }
            for path in peer.paths.values()
        ],
    }


def describe_told_link(reporter: str, hop: HopReading) -> dict[str, Any]:
    """The link from one peer to another, as the first peer reported it, without addresses."""
    figures = {"rtt_ms": hop.rtt_ms or None, "mb_per_s": hop.mb_per_s or None}
    paths = [{"address": "", "kind": hop.kind, **figures, "works": True}] if hop.kind else []
    return {"from": reporter, "to": hop.peer_id, "address": "", **figures, "paths": paths}


def describe_cables(view: View) -> list[dict[str, Any]]:
    """Every Thunderbolt cable between two peers, once. up: both ends have an active RDMA port."""
    return [
        {
            "ends": [
                {"peer": peer_id, "device": port.device, "active": port.active}
                for peer_id, port in ((link.peer_id, link.port), (link.other_id, link.other_port))
            ],
            "up": link.is_up,
            "speed": link.port.speed,
            "transport": "rdma" if link.is_up else "thunderbolt",
        }
        for link in cables(view.peers())
        if (link.peer_id, link.port.uuid) < (link.other_id, link.other_port.uuid)
    ]


def describe_topology(membership: Membership, instances: Instances) -> dict[str, Any]:
    """The peers, the links of this node and of other peers, refused peers with reasons, and the ring of each instance.

    view_digest: equal at all peers that agree. capacity: the sum of the peers' last reports.
    """
    own_id = membership.own.id
    readings = membership.telemetry
    return {
        "node_id": own_id,
        "view_digest": membership.view.digest(),
        "capacity": {
            "peers": len(membership.view.peers()),
            "total_bytes": sum(reading.total_bytes for reading in readings.values()),
            "usable_bytes": sum(reading.usable_bytes for reading in readings.values()),
            "reserved_bytes": sum(reading.reserved_bytes for reading in readings.values()),
        },
        "peers": [
            {
                "id": peer.id,
                "name": peer.name,
                "role": peer.role,
                "tags": list(peer.tags),
                "devices": [describe_device(device) for device in peer.devices],
            }
            for peer in membership.view.peers()
        ],
        "links": [
            *(describe_link(own_id, peer) for peer in membership.peers),
            *(describe_told_link(*reported) for reported in hops_of_others(own_id, readings)),
        ],
        "cables": describe_cables(membership.view),
        "refused": list(membership.refusals),
        "rings": [
            {
                "instance": instance.plan.instance_id,
                "model": instance.plan.model,
                "state": str(instance.state),
                "hops": [
                    {
                        "peer": stage.peer_id,
                        "peers": list(stage.peers),
                        "layers": [stage.shard.start, stage.shard.stop],
                        "engine": stage.engine,
                    }
                    for stage in instance.plan.stages
                ],
            }
            for _, instance in instances.all()
        ],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)

"""Describes this node and the mesh by the structs of `domain.reports`: numbers and names only, no prompt, no token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from exo_mesh.domain.device import Device, HopReading, PeerInfo, Telemetry
from exo_mesh.domain.download import DownloadInfo
from exo_mesh.domain.power import HardwareReading
from exo_mesh.domain.rdma_links import cables
from exo_mesh.domain.reports import (
    CableEnd,
    CableReport,
    DeviceReading,
    DeviceReport,
    DownloadReport,
    GroupReport,
    HardwareReport,
    HopReport,
    InstanceReport,
    InstanceStage,
    LinkPath,
    LinkReport,
    MeshCapacity,
    PeerReport,
    RingHop,
    RingReport,
    StageCounters,
    TelemetryReport,
    TopologyPeer,
    TopologyReport,
    ViewReport,
    report_from,
)
from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.view import InstanceInfo, InstanceState, View
from exo_mesh.errors import MemoryPressureError
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting.status_board import StageBeat
from exo_mesh.rings.placing.instances import Instances
from exo_mesh.rings.placing.stage_phases import StagePhase, note_phases


def describe_instance(
    instance: InstanceInfo,
    owner: str,
    known_phases: Callable[[str], Sequence[StagePhase]],
    downloads: Iterable[tuple[str, DownloadInfo]] = (),
) -> InstanceReport:
    """An instance as in GET /state. known_phases: see stage_phases.note_phases. downloads: (peer id, download) pairs of
    the view; while the instance is loading, each stage lists the downloads of its peers."""
    plan = instance.plan
    shown = report_from(
        plan,
        InstanceReport,
        id=plan.instance_id,
        state=instance.state,
        reason=instance.reason,
        automatic=instance.is_auto,
        owner=owner,
        ballot=(instance.ballot.counter, instance.ballot.proposer),
        kv_pool_tokens=plan.kv_tokens,
        policy=plan.inputs.policy,
        stages=[_describe_stage(instance, index, downloads) for index in range(len(plan.stages))],
    )
    note_phases(shown, known_phases)
    return shown


def _describe_stage(instance: InstanceInfo, index: int, downloads: Iterable[tuple[str, DownloadInfo]]) -> InstanceStage:
    stage, model = instance.plan.stages[index], instance.plan.model
    group = stage.group
    shown = InstanceStage(
        peer=stage.peer_id,
        engine=stage.engine,
        layers=(stage.shard.start, stage.shard.stop),
        reserve_bytes=stage.reserve_bytes,
        group=UNSET if group is None else GroupReport(group.backend, group.peers, group.rdma),
        endpoint=instance.endpoints[index] if instance.endpoints else None,
        pid=instance.pids[index] if instance.pids else None,
    )
    if instance.state is InstanceState.LOADING:
        mine = [(peer_id, one) for peer_id, one in downloads if peer_id in stage.peers and one.model == model]
        shown.downloads = [describe_download(peer_id, one) for peer_id, one in mine]
    return shown


def describe_download(owner: str, info: DownloadInfo) -> DownloadReport:
    return report_from(info, DownloadReport, peer=owner, model=UNSET)


def describe_device(device: Device) -> DeviceReport:
    return report_from(device, DeviceReport)


def describe_peer(peer: PeerInfo) -> PeerReport:
    return report_from(
        peer,
        PeerReport,
        alive=True,
        devices=[describe_device(device) for device in peer.devices],
        engine_versions={info.name: info.version for device in peer.devices for info in device.details},
        model_engines=dict(peer.model_engines),
    )


def describe_view(view: View, known_phases: Callable[[str], Sequence[StagePhase]]) -> ViewReport:
    """The shared view, with the phases of the instances that this node brings up."""
    downloads = view.downloads()
    listed = [describe_download(owner, one) for owner, one in downloads]
    for shown, (_, one) in zip(listed, downloads, strict=True):
        shown.model = one.model
    return ViewReport(
        peers=[describe_peer(peer) for peer in view.peers()],
        instances=[describe_instance(one, owner, known_phases, downloads) for owner, one in view.instances()],
        downloads=listed,
        view_digest=view.digest(),
    )


def describe_telemetry(reading: Telemetry) -> TelemetryReport:
    return report_from(
        reading,
        TelemetryReport,
        load=round(reading.load, 2),
        s_per_gb={engine: round(seconds, 6) for engine, seconds in sorted(reading.s_per_gb.items())},
        tokens=dict(sorted(reading.tokens.items())),
        temperature_c=round(reading.temperature_c, 1) or None,
        power_w=round(reading.power_w, 1) or None,
        hardware=_describe_hardware(reading.hardware),
        frames=dict(sorted(reading.frames.items())),
        draining=reading.is_draining,
        hops=[HopReport(hop.peer_id, hop.rtt_ms or None, hop.mb_per_s or None, hop.kind) for hop in reading.hops],
    )


def _describe_hardware(reading: HardwareReading) -> HardwareReport:
    """The readings without the parts."""
    accelerators = [
        DeviceReading(id=one.id, kind=one.kind, vendor=one.vendor, name=one.name, **one.values.describe())
        for one in reading.accelerators
    ]
    return HardwareReport(DeviceReading(**reading.machine.describe()), accelerators)


def describe_stage_memory(stage: StageBeat) -> dict[str, Any]:
    """The memory of a stage. Only the driver reports the KV pool, in token positions; each stage of its ring holds
    these positions for its own layers."""
    shown: dict[str, Any] = {
        "instance": stage.instance_id,
        "stage": stage.index,
        "memory_bytes": stage.beat.memory_bytes,
        "sequences": stage.beat.sequences,
        "library": msgspec.to_builtins(stage.beat.library) if stage.beat.library is not None else None,
        "prefix_cache": {"sequences": stage.beat.prefix.kept, "bytes": stage.beat.prefix.num_bytes},
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


def describe_beat(beat: Heartbeat) -> StageCounters:
    return report_from(beat, StageCounters)


def describe_link(own_id: str, peer: Peer) -> LinkReport:
    """The link from this node to a peer, with the measurements of each known path."""
    used = peer.paths.get(peer.client.address)
    return LinkReport(
        source=own_id,
        to=peer.id,
        address=peer.client.address,
        rtt_ms=_rounded(used.rtt_ms if used is not None and used.works else peer.rtt_ms),
        mb_per_s=_rounded(used.mb_per_s) if used is not None else None,
        mb_per_s_at=used.mb_per_s_at if used is not None else None,
        paths=[
            LinkPath(
                address=path.address,
                kind=path.kind.name.lower(),
                rtt_ms=_rounded(path.rtt_ms),
                mb_per_s=_rounded(path.mb_per_s),
                mb_per_s_at=path.mb_per_s_at,
                works=path.works,
            )
            for path in peer.paths.values()
        ],
    )


def describe_hop(reporter: str, hop: HopReading) -> LinkReport:
    """The link from one peer to another, as the first peer reported it, without addresses."""
    rtt_ms, mb_per_s = hop.rtt_ms or None, hop.mb_per_s or None
    path = LinkPath(address="", kind=hop.kind, rtt_ms=rtt_ms, mb_per_s=mb_per_s, works=True)
    return LinkReport(
        source=reporter,
        to=hop.peer_id,
        address="",
        rtt_ms=rtt_ms,
        mb_per_s=mb_per_s,
        paths=[path] if hop.kind else [],
    )


def describe_links(membership: Membership, readings: Mapping[str, Telemetry]) -> list[LinkReport]:
    """The links of this node, then the links of other peers, which are in their readings."""
    own_id = membership.own.id
    hops = hops_of_others(own_id, readings)
    return [*(describe_link(own_id, peer) for peer in membership.peers), *(describe_hop(*one) for one in hops)]


def describe_cables(view: View) -> list[CableReport]:
    """Every Thunderbolt cable between two peers, once."""
    return [
        CableReport(
            ends=[
                CableEnd(peer_id, port.device, port.active)
                for peer_id, port in ((link.peer_id, link.port), (link.other_id, link.other_port))
            ],
            up=link.is_up,
            speed=link.port.speed,
            transport="rdma" if link.is_up else "thunderbolt",
        )
        for link in cables(view.peers())
        if (link.peer_id, link.port.uuid) < (link.other_id, link.other_port.uuid)
    ]


def describe_topology(membership: Membership, instances: Instances) -> TopologyReport:
    """The peers, the links of this node and of other peers, refused peers with reasons, and the ring of each
    instance."""
    readings, peers = membership.telemetry, membership.view.peers()
    return TopologyReport(
        node_id=membership.own.id,
        view_digest=membership.view.digest(),
        capacity=MeshCapacity(
            peers=len(peers),
            total_bytes=sum(reading.total_bytes for reading in readings.values()),
            usable_bytes=sum(reading.usable_bytes for reading in readings.values()),
            reserved_bytes=sum(reading.reserved_bytes for reading in readings.values()),
        ),
        peers=[
            TopologyPeer(peer.id, peer.name, peer.role, peer.tags, [describe_device(one) for one in peer.devices])
            for peer in peers
        ],
        links=describe_links(membership, readings),
        cables=describe_cables(membership.view),
        refused=list(membership.refusals),
        rings=[
            RingReport(
                instance=instance.plan.instance_id,
                model=instance.plan.model,
                state=instance.state,
                hops=[
                    RingHop(stage.peer_id, stage.peers, (stage.shard.start, stage.shard.stop), stage.engine)
                    for stage in instance.plan.stages
                ],
            )
            for _, instance in instances.all()
        ],
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def hops_of_others(own_id: str, readings: Mapping[str, Telemetry]) -> list[tuple[str, HopReading]]:
    """(peer, its link to another peer) once for each pair of other live peers. If both peers report their link, the
    report of the peer with the lower id is used."""
    found: dict[tuple[str, str], tuple[str, HopReading]] = {}
    for reporter in sorted(readings):
        for hop in readings[reporter].hops:
            if own_id not in (reporter, hop.peer_id) and hop.peer_id in readings and reporter != hop.peer_id:
                found.setdefault((min(reporter, hop.peer_id), max(reporter, hop.peer_id)), (reporter, hop))
    return [found[pair] for pair in sorted(found)]

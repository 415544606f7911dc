"""Converts peers, instances, downloads, records and telemetry of the control plane to protobuf and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice

from exo_mesh.base.printable import printable
from exo_mesh.domain.addresses import MAX_MACS, valid_macs
from exo_mesh.domain.device import (
    FETCHES,
    FULL,
    ROLES,
    Device,
    EngineInfo,
    EntryRequests,
    HopReading,
    PeerInfo,
    RdmaPort,
    StaticRank,
    Telemetry,
)
from exo_mesh.domain.download import DownloadInfo, DownloadState
from exo_mesh.domain.health import MAX_REASONS, MAX_TEXT, HealthLevel, Reason
from exo_mesh.domain.plan import NO_BALLOT
from exo_mesh.domain.power.readings import NO_HARDWARE
from exo_mesh.domain.shared.settings import SharedSettings
from exo_mesh.domain.speed.engine_speed import DIGEST_CHARS
from exo_mesh.domain.view import (
    KINDS,
    MAX_CARD_BYTES,
    MAX_FOREIGN_BYTES,
    CardInfo,
    ForeignInfo,
    InstanceInfo,
    InstanceState,
    Record,
    RecordKey,
)
from exo_mesh.errors import TransportError
from exo_mesh.wire.proto import control_pb2 as pb
from tests.wire.old_codecs.hardware_codec import hardware_from_proto, hardware_to_proto
from tests.wire.old_codecs.plan_codec import (
    MAX_KEPT,
    ballot_from_proto,
    ballot_to_proto,
    kept_from_proto,
    kept_to_proto,
    plan_from_proto,
    plan_to_proto,
)
from tests.wire.old_codecs.served_codec import MAX_SERVED, served_from_proto, served_to_proto
from tests.wire.old_codecs.settings_codec import settings_from_proto, settings_to_proto
from tests.wire.old_codecs.speeds_codec import MAX_MODELS, speeds_from_proto, speeds_to_proto

MAX_REASON = 256  # characters
MAX_KIND = 40
MAX_ITEMS = 1024
"""Most addresses, models or engines of one peer; the rest is cut off, so that one peer cannot fill the others'
memory."""

MAX_HOPS = 16

MAX_NAMES_BYTES = 64 * 1024
"""Most bytes of model names that one peer publishes, so that its hello stays below the limit for strangers."""

MAX_ENGINES = 32
"""Most engines of one peer with details beyond their names, and most dtypes of one engine."""

MAX_PORTS = 32
"""Most Thunderbolt ports of one peer; a Mac Studio has six."""

_STATES = {
    InstanceState.LOADING: pb.INSTANCE_STATE_LOADING,
    InstanceState.READY: pb.INSTANCE_STATE_READY,
    InstanceState.FAILED: pb.INSTANCE_STATE_FAILED,
}
_DOWNLOAD_STATES = {
    DownloadState.PENDING: pb.DOWNLOAD_STATE_PENDING,
    DownloadState.ONGOING: pb.DOWNLOAD_STATE_ONGOING,
    DownloadState.COMPLETED: pb.DOWNLOAD_STATE_COMPLETED,
    DownloadState.FAILED: pb.DOWNLOAD_STATE_FAILED,
}
_DOWNLOAD_STATES_BACK = {number: state for state, number in _DOWNLOAD_STATES.items()}
_STATES_BACK = {number: state for state, number in _STATES.items()}


def peer_to_proto(peer: PeerInfo) -> pb.PeerInfo:
    return pb.PeerInfo(
        id=peer.id,
        incarnation=peer.incarnation,
        name=peer.name,
        version=peer.version,
        protocol=peer.protocol,
        namespace=peer.namespace,
        addresses=peer.addresses,
        api_url=peer.api_url,
        devices=[_device_to_proto(device) for device in peer.devices],
        models=peer.models[: _num_within(peer.models)],
        model_engines=[
            pb.ModelEngines(model=model, engines=engines[:MAX_ENGINES])
            for model, engines in peer.model_engines[: _num_within([model for model, _ in peer.model_engines])]
        ],
        rdma_ports=[
            pb.RdmaPort(
                device=p.device,
                active=p.active,
                uuid=p.uuid,
                other_uuid=p.other_uuid,
                speed=p.speed,
                max_queue_pairs=p.max_queue_pairs,
                bridged=p.bridged,
            )
            for p in peer.rdma_ports
        ],
        static_rank=None if peer.static_rank is None else _rank_to_proto(peer.static_rank),
        fetches=peer.fetches,
        files_port=peer.files_port,
        partial_models=peer.partial_models[: _num_within(peer.partial_models)],
        has_store=peer.has_store,
        newest_protocol=peer.newest_protocol,
        macs=peer.macs,
        role="" if peer.role == FULL else peer.role,
        served=[served_to_proto(one) for one in peer.served[:MAX_SERVED]],
        engine_speeds=speeds_to_proto(peer.engine_speeds),
        on_disk=[
            pb.ModelOnDisk(digest=digest, layers=[kept_to_proto(one) for one in kept[:MAX_KEPT]])
            for digest, kept in peer.on_disk[:MAX_MODELS]
        ],
        unverified=peer.unverified[: _num_within(peer.unverified)],
    )


def peer_from_proto(message: pb.PeerInfo) -> PeerInfo:
    """Raises TransportError if the id is missing or too long."""
    if not message.id or len(message.id) > 64:
        raise TransportError(f'a peer sent an invalid id: "{message.id[:80]}"')
    return PeerInfo(
        id=message.id,
        incarnation=message.incarnation,
        name=message.name[:256],
        version=message.version[:64],
        protocol=message.protocol,
        namespace=message.namespace,
        addresses=tuple(message.addresses[:MAX_ITEMS]),
        api_url=message.api_url,
        devices=tuple(_device_from_proto(device) for device in message.devices[:MAX_ITEMS]),
        models=tuple(message.models[:MAX_ITEMS]),
        model_engines=tuple(
            (item.model, tuple(item.engines[:MAX_ENGINES])) for item in message.model_engines[:MAX_ITEMS]
        ),
        rdma_ports=tuple(
            RdmaPort(
                p.device[:64], p.active, p.uuid[:64], p.other_uuid[:64], p.speed[:64], p.max_queue_pairs, p.bridged
            )
            for p in message.rdma_ports[:MAX_PORTS]
        ),
        static_rank=_rank_from_proto(message.static_rank) if message.HasField("static_rank") else None,
        fetches=message.fetches if message.fetches in FETCHES else "",
        files_port=message.files_port if message.files_port < 65_536 else 0,
        partial_models=tuple(message.partial_models[:MAX_ITEMS]),
        has_store=message.has_store,
        newest_protocol=message.newest_protocol,
        macs=valid_macs(message.macs[:MAX_MACS]),
        role=message.role if message.role in ROLES else FULL,
        served=tuple(served_from_proto(one) for one in message.served[:MAX_SERVED]),
        engine_speeds=speeds_from_proto(message.engine_speeds),
        on_disk=tuple(
            (printable(one.digest, DIGEST_CHARS), kept_from_proto(one.layers)) for one in message.on_disk[:MAX_MODELS]
        ),
        unverified=tuple(message.unverified[:MAX_ITEMS]),
    )


def _num_within(names: Sequence[str]) -> int:
    """How many of the names fit into MAX_NAMES_BYTES."""
    sizes = accumulate(len(name.encode("utf-8", "replace")) for name in names[:MAX_ITEMS])
    return sum(size <= MAX_NAMES_BYTES for size in sizes)


def _rank_to_proto(rank: StaticRank) -> pb.StaticRank:
    devices = [device or "" for device in rank.rdma]
    return pb.StaticRank(group=rank.group, rank=rank.rank, size=rank.size, backend=rank.backend, rdma=devices)


def _rank_from_proto(message: pb.StaticRank) -> StaticRank:
    devices = tuple(device[:64] or None for device in message.rdma[:MAX_PORTS])
    return StaticRank(message.group[:64], message.rank, message.size, message.backend[:16], devices)


def _device_to_proto(device: Device) -> pb.Device:
    details = [
        pb.EngineInfo(name=info.name, compute=info.compute, version=info.version, dtypes=info.dtypes)
        for info in device.details
    ]
    return pb.Device(
        kind=device.kind,
        name=device.name,
        engines=device.engines,
        engine=device.engine,
        cores=device.cores,
        details=details,
        memory_bytes=device.memory_bytes,
        why=device.why,
    )


def _device_from_proto(message: pb.Device) -> Device:
    details = tuple(
        EngineInfo(info.name[:64], info.compute[:32], info.version[:128], tuple(info.dtypes[:MAX_ENGINES]))
        for info in message.details[:MAX_ENGINES]
    )
    engines = tuple(message.engines[:MAX_ITEMS])
    return Device(
        message.kind,
        message.name,
        engines,
        message.engine,
        message.cores,
        details,
        message.memory_bytes,
        message.why[:MAX_REASON],
    )


def instance_to_proto(instance: InstanceInfo) -> pb.InstanceInfo:
    return pb.InstanceInfo(
        plan=plan_to_proto(instance.plan),
        state=_STATES[instance.state],
        endpoints=instance.endpoints,
        pids=instance.pids,
        reason=instance.reason,
        adopted=None if instance.adopted == NO_BALLOT else ballot_to_proto(instance.adopted),
        automatic=instance.is_auto,
    )


def instance_from_proto(message: pb.InstanceInfo) -> InstanceInfo:
    """Raises TransportError if the message has no valid plan."""
    try:
        plan = plan_from_proto(message.plan)
    except ValueError as exc:
        raise TransportError(f"a peer sent an invalid plan: {exc}") from exc
    state = _STATES_BACK.get(message.state, InstanceState.LOADING)  # a state of a newer version counts as loading
    adopted = ballot_from_proto(message.adopted) if message.HasField("adopted") else NO_BALLOT
    endpoints, pids = tuple(message.endpoints), tuple(message.pids)
    return InstanceInfo(plan, state, endpoints, pids, message.reason, adopted, message.automatic)


def download_to_proto(download: DownloadInfo) -> pb.DownloadInfo:
    start, stop = download.layers
    return pb.DownloadInfo(
        model=download.model,
        state=_DOWNLOAD_STATES[download.state],
        done_bytes=download.done_bytes,
        total_bytes=download.total_bytes,
        bytes_per_s=download.bytes_per_s,
        eta_s=download.eta_s,
        layers=pb.LayerRange(start=start, stop=stop),
        whole=download.is_whole,
        reason=download.reason[:MAX_TEXT],
        remedy=download.remedy[:MAX_TEXT],
        from_hub_bytes=download.from_hub_bytes,
        from_peers_bytes=download.from_peers_bytes,
    )


def download_from_proto(message: pb.DownloadInfo) -> DownloadInfo:
    return DownloadInfo(
        message.model[:MAX_REASON],
        _DOWNLOAD_STATES_BACK.get(message.state, DownloadState.PENDING),
        message.done_bytes,
        message.total_bytes,
        message.bytes_per_s,
        message.eta_s,
        (message.layers.start, message.layers.stop),
        message.whole,
        message.reason[:MAX_TEXT],
        message.remedy[:MAX_TEXT],
        message.from_hub_bytes,
        message.from_peers_bytes,
    )


def card_info_from_proto(message: pb.Record) -> CardInfo:
    """Raises TransportError if the card is too long or is not text."""
    toml = message.card.toml
    if len(toml) > MAX_CARD_BYTES or len(message.id) > MAX_REASON:
        raise TransportError(f"a peer sent a model card of {len(toml)} bytes; {MAX_CARD_BYTES} are allowed")
    try:
        return CardInfo(toml.decode())
    except UnicodeDecodeError as exc:
        raise TransportError("a peer sent a model card that is not UTF-8 text") from exc


def record_to_proto(record: Record, deleted_s: float = 0.0) -> pb.Record:
    """deleted_s: seconds since the deletion, for a deleted record."""
    if isinstance(record.value, ForeignInfo):
        return pb.Record.FromString(record.value.content)
    message = pb.Record(**record.key._asdict(), version=record.version, deleted=record.deleted, deleted_s=deleted_s)
    if isinstance(record.value, PeerInfo):
        message.peer.CopyFrom(peer_to_proto(record.value))
    elif isinstance(record.value, InstanceInfo):
        message.instance.CopyFrom(instance_to_proto(record.value))
    elif isinstance(record.value, DownloadInfo):
        message.download.CopyFrom(download_to_proto(record.value))
    elif isinstance(record.value, CardInfo):
        message.card.CopyFrom(pb.CardInfo(toml=record.value.toml.encode()))
    elif isinstance(record.value, SharedSettings):
        message.settings.CopyFrom(settings_to_proto(record.value))
    return message


def record_from_proto(message: pb.Record) -> Record:
    """A record of a kind that only a newer version knows is kept unchanged. Raises TransportError if kind and content
    disagree."""
    key = RecordKey(message.kind, message.id, message.owner)
    if message.deleted:
        return Record(key, message.version, None)
    if message.kind not in KINDS:
        return Record(key, message.version, ForeignInfo(_foreign_bytes(message)))
    if message.kind == "peer" and message.HasField("peer"):
        return Record(key, message.version, peer_from_proto(message.peer))
    if message.kind == "instance" and message.HasField("instance"):
        return Record(key, message.version, instance_from_proto(message.instance))
    if message.kind == "download" and message.HasField("download"):
        return Record(key, message.version, download_from_proto(message.download))
    if message.kind == "card" and message.HasField("card"):
        return Record(key, message.version, card_info_from_proto(message))
    if message.kind == "settings" and message.HasField("settings"):
        return Record(key, message.version, settings_from_proto(message.settings))
    raise TransportError(f'a peer sent a record of kind "{message.kind[:40]}" without its content')


def _foreign_bytes(message: pb.Record) -> bytes:
    if message.ByteSize() > MAX_FOREIGN_BYTES or not 0 < len(message.kind) <= MAX_KIND:
        raise TransportError(f'a peer sent a record of kind "{message.kind[:40]}" with {message.ByteSize()} bytes')
    return message.SerializeToString()


def telemetry_to_proto(reading: Telemetry) -> pb.Telemetry:
    return pb.Telemetry(
        peer_id=reading.peer_id,
        sequence=reading.sequence,
        usable_bytes=reading.usable_bytes,
        total_bytes=reading.total_bytes,
        reserved_bytes=reading.reserved_bytes,
        load=reading.load,
        s_per_gb=reading.s_per_gb,
        tokens=reading.tokens,
        outstanding=reading.outstanding,
        reasons=[
            pb.HealthReason(code=reason.code, level=reason.level, message=reason.message, remedy=reason.remedy)
            for reason in reading.reasons[:MAX_REASONS]
        ],
        keys_digest=reading.keys_digest,
        fetch_room_bytes=reading.fetch_room_bytes,
        capacity_bytes=reading.capacity_bytes,
        headroom_bytes=reading.headroom_bytes,
        temperature_c=reading.temperature_c,
        power_w=reading.power_w,
        frames=reading.frames,
        draining=reading.is_draining,
        hops=[
            pb.HopReading(peer_id=hop.peer_id, rtt_ms=hop.rtt_ms, mb_per_s=hop.mb_per_s, kind=hop.kind)
            for hop in reading.hops[:MAX_HOPS]
        ],
        hardware=None if reading.hardware == NO_HARDWARE else hardware_to_proto(reading.hardware),
        prompt_tokens=reading.prompt_tokens,
        entry_requests=None if reading.entry_requests is None else _entry_requests_to_proto(reading.entry_requests),
        waiting=reading.waiting,
        slots=reading.slots,
    )


def telemetry_from_proto(message: pb.Telemetry) -> Telemetry:
    return Telemetry(
        message.peer_id,
        message.sequence,
        message.usable_bytes,
        message.total_bytes,
        message.reserved_bytes,
        message.load,
        dict(islice(message.s_per_gb.items(), MAX_ITEMS)),
        dict(islice(message.tokens.items(), MAX_ITEMS)),
        dict(islice(message.outstanding.items(), MAX_ITEMS)),
        tuple(_reason_from_proto(reason) for reason in message.reasons[:MAX_REASONS]),
        message.keys_digest,
        message.fetch_room_bytes,
        message.capacity_bytes,
        message.headroom_bytes if message.HasField("headroom_bytes") else None,
        temperature_c=message.temperature_c,
        power_w=message.power_w,
        frames=dict(islice(message.frames.items(), MAX_ITEMS)),
        is_draining=message.draining,
        hops=tuple(
            HopReading(hop.peer_id[:64], hop.rtt_ms, hop.mb_per_s, hop.kind[:16]) for hop in message.hops[:MAX_HOPS]
        ),
        hardware=hardware_from_proto(message.hardware) if message.HasField("hardware") else NO_HARDWARE,
        prompt_tokens=dict(islice(message.prompt_tokens.items(), MAX_ITEMS)),
        entry_requests=_entry_requests_from_proto(message) if message.HasField("entry_requests") else None,
        waiting=dict(islice(message.waiting.items(), MAX_ITEMS)),
        slots=dict(islice(message.slots.items(), MAX_ITEMS)),
    )


def _entry_requests_to_proto(requests: EntryRequests) -> pb.EntryRequests:
    return pb.EntryRequests(running=requests.running, awaited=sorted(requests.awaited))


def _entry_requests_from_proto(message: pb.Telemetry) -> EntryRequests:
    requests = message.entry_requests
    running = dict(islice(requests.running.items(), MAX_ITEMS))
    return EntryRequests(running, frozenset(islice(requests.awaited, MAX_ITEMS)))


def _reason_from_proto(message: pb.HealthReason) -> Reason:
    level = HealthLevel(message.level) if message.level in set(HealthLevel) else HealthLevel.DEGRADED
    return Reason(message.code[:64], level, message.message[:MAX_TEXT], message.remedy[:MAX_TEXT])

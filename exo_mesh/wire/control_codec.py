"""Converts peers, instances, downloads, records and telemetry of the control plane to protobuf and back."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from exo_mesh.domain.device import PeerInfo, Telemetry
from exo_mesh.domain.download import DownloadInfo
from exo_mesh.domain.shared_settings import MAX_COUNTER, MAX_TEXT_BYTES, SharedSetting, SharedSettings
from exo_mesh.domain.stage import StageStatus
from exo_mesh.domain.view import (
    MAX_FOREIGN_BYTES,
    CardInfo,
    ForeignInfo,
    InstanceInfo,
    Record,
    RecordKey,
    RecordValue,
    Unread,
)
from exo_mesh.errors import TransportError
from exo_mesh.wire import hardware_codec, plan_codec  # noqa: F401 - parts of these messages by hand
from exo_mesh.wire.message_codec import Codec, by_hand
from exo_mesh.wire.proto import control_pb2 as pb

MAX_ID = 256  # characters
MAX_KIND = 40
MAX_SETTING_NAME = 64
"""Most characters of the name of a shared setting, and of its author's id."""

PEER = Codec(PeerInfo, pb.PeerInfo, error=TransportError)
INSTANCE = Codec(InstanceInfo, pb.InstanceInfo, error=TransportError)
DOWNLOAD = Codec(DownloadInfo, pb.DownloadInfo, error=TransportError)
CARD = Codec(CardInfo, pb.CardInfo, error=TransportError)
SETTINGS = Codec(SharedSettings, pb.SharedSettings, error=TransportError)
TELEMETRY = Codec(Telemetry, pb.Telemetry, besides=["keeps_hops"])
STAGE = Codec(StageStatus, pb.LookAtStageReply, besides=["runs", "reason"])

peer_to_proto, peer_from_proto = PEER.write, PEER.read
instance_to_proto, instance_from_proto = INSTANCE.write, INSTANCE.read
download_to_proto, download_from_proto = DOWNLOAD.write, DOWNLOAD.read
settings_to_proto, settings_from_proto = SETTINGS.write, SETTINGS.read
telemetry_to_proto, telemetry_from_proto = TELEMETRY.write, TELEMETRY.read
status_from_proto = STAGE.read


def status_to_proto(status: StageStatus, why_not: str) -> pb.LookAtStageReply:
    """why_not: why the stage of the requested plan does not run here; "" if it does."""
    return STAGE.write(status, runs=not why_not, reason=why_not)


_KINDS: dict[str, Codec[Any, Any]] = {
    "peer": PEER,
    "instance": INSTANCE,
    "download": DOWNLOAD,
    "card": CARD,
    "settings": SETTINGS,
}
"""By kind of a record, which is also the name of the record's field: the codec of its content."""
_KIND_OF = {codec.cls: kind for kind, codec in _KINDS.items()}


def record_to_proto(record: Record) -> pb.Record:
    if isinstance(record.content, Unread):
        return pb.Record.FromString(record.content.data)
    value = record.content
    if isinstance(value, ForeignInfo):
        return pb.Record.FromString(value.content)
    message = pb.Record(
        **record.key._asdict(), version=record.version, deleted=record.deleted, deleted_s=record.deleted_s
    )
    if value is not None:
        kind = _KIND_OF[type(value)]
        getattr(message, kind).CopyFrom(_KINDS[kind].write(value))
    return message


def record_from_proto(message: pb.Record) -> Record:
    """The content is only read when it is needed. It is ForeignInfo if it breaks a bound, or is of a kind that only a
    newer version knows. Raises TransportError if kind and content disagree."""
    key = RecordKey(message.kind, message.id, message.owner)
    if message.deleted:
        return Record(key, message.version, None, message.deleted_s)
    if message.kind not in _KINDS:
        return Record(key, message.version, ForeignInfo(_foreign_bytes(message)))
    if not message.HasField(message.kind):
        raise TransportError(f'a peer sent a record of kind "{message.kind[:40]}" without its content')
    return Record(key, message.version, Unread(message.SerializeToString(), _value))


def encoded(record: Record) -> Record:
    """A record of this node, whose content is encoded once for all peers that get it."""
    value = record.content
    if value is None or isinstance(value, ForeignInfo | Unread):
        return record
    return replace(record, content=Unread(record_to_proto(record).SerializeToString(), lambda data: value))


def record_bytes(record: Record) -> int:
    """The length of a record as it is sent."""
    content = record.content
    return len(content.data) if isinstance(content, Unread) else record_to_proto(record).ByteSize()


def _value(data: bytes) -> RecordValue:
    message = pb.Record.FromString(data)
    try:
        return _checked_value(message)
    except TransportError:
        return ForeignInfo(data)


def _checked_value(message: pb.Record) -> RecordValue:
    codec = _KINDS[message.kind]
    if codec is CARD and len(message.id) > MAX_ID:
        raise TransportError(f"a peer sent a model card with an id of {len(message.id)} characters; at most {MAX_ID}")
    value: RecordValue = codec.read(getattr(message, message.kind))
    return value


def _foreign_bytes(message: pb.Record) -> bytes:
    if message.ByteSize() > MAX_FOREIGN_BYTES or not 0 < len(message.kind) <= MAX_KIND:
        raise TransportError(f'a peer sent a record of kind "{message.kind[:40]}" with {message.ByteSize()} bytes')
    return message.SerializeToString()


def _setting_to_proto(entry: SharedSetting) -> dict[str, Any]:
    return {
        "name": entry.name,
        "text": (entry.text or "").encode(),
        "removed": entry.text is None,
        "counter": entry.counter,
        "author": entry.author,
    }


def _setting_from_proto(message: pb.SharedSetting) -> SharedSetting:
    """Raises ValueError for an entry that no peer of any version would send."""
    is_short = len(message.name) <= MAX_SETTING_NAME >= len(message.author) and len(message.text) <= MAX_TEXT_BYTES
    if not is_short or not 0 < message.counter <= MAX_COUNTER:
        raise ValueError("a shared setting is too long, or its counter is out of range")
    text = None if message.removed else message.text.decode()
    return SharedSetting(message.name, text, message.counter, message.author)


by_hand(Record, record_from_proto, record_to_proto, *pb.Record.DESCRIPTOR.fields_by_name)
by_hand(SharedSetting, _setting_from_proto, _setting_to_proto, "name", "text", "removed", "counter", "author")

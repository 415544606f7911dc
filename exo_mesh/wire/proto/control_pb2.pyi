from exo_mesh.wire.proto import driver_pb2 as _driver_pb2
from exo_mesh.wire.proto import plan_pb2 as _plan_pb2
from exo_mesh.wire.proto import runner_pb2 as _runner_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PEER_STATE_UNSPECIFIED: _ClassVar[PeerState]
    PEER_STATE_ALIVE: _ClassVar[PeerState]
    PEER_STATE_SUSPECT: _ClassVar[PeerState]
    PEER_STATE_DEAD: _ClassVar[PeerState]
    PEER_STATE_LEFT: _ClassVar[PeerState]

class InstanceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INSTANCE_STATE_UNSPECIFIED: _ClassVar[InstanceState]
    INSTANCE_STATE_LOADING: _ClassVar[InstanceState]
    INSTANCE_STATE_READY: _ClassVar[InstanceState]
    INSTANCE_STATE_FAILED: _ClassVar[InstanceState]

class DownloadState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DOWNLOAD_STATE_UNSPECIFIED: _ClassVar[DownloadState]
    DOWNLOAD_STATE_PENDING: _ClassVar[DownloadState]
    DOWNLOAD_STATE_ONGOING: _ClassVar[DownloadState]
    DOWNLOAD_STATE_COMPLETED: _ClassVar[DownloadState]
    DOWNLOAD_STATE_FAILED: _ClassVar[DownloadState]
PEER_STATE_UNSPECIFIED: PeerState
PEER_STATE_ALIVE: PeerState
PEER_STATE_SUSPECT: PeerState
PEER_STATE_DEAD: PeerState
PEER_STATE_LEFT: PeerState
INSTANCE_STATE_UNSPECIFIED: InstanceState
INSTANCE_STATE_LOADING: InstanceState
INSTANCE_STATE_READY: InstanceState
INSTANCE_STATE_FAILED: InstanceState
DOWNLOAD_STATE_UNSPECIFIED: DownloadState
DOWNLOAD_STATE_PENDING: DownloadState
DOWNLOAD_STATE_ONGOING: DownloadState
DOWNLOAD_STATE_COMPLETED: DownloadState
DOWNLOAD_STATE_FAILED: DownloadState

class Device(_message.Message):
    __slots__ = ("kind", "name", "engines", "engine", "cores", "details", "memory_bytes", "why")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    engines: _containers.RepeatedScalarFieldContainer[str]
    engine: str
    cores: int
    details: _containers.RepeatedCompositeFieldContainer[EngineInfo]
    memory_bytes: int
    why: str
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., engines: _Optional[_Iterable[str]] = ..., engine: _Optional[str] = ..., cores: _Optional[int] = ..., details: _Optional[_Iterable[_Union[EngineInfo, _Mapping]]] = ..., memory_bytes: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("name", "compute", "version", "dtypes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    name: str
    compute: str
    version: str
    dtypes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., compute: _Optional[str] = ..., version: _Optional[str] = ..., dtypes: _Optional[_Iterable[str]] = ...) -> None: ...

class ModelEngines(_message.Message):
    __slots__ = ("model", "engines")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    model: str
    engines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., engines: _Optional[_Iterable[str]] = ...) -> None: ...

class ForwardCost(_message.Message):
    __slots__ = ("fixed_s", "layer_s", "head_s")
    FIXED_S_FIELD_NUMBER: _ClassVar[int]
    LAYER_S_FIELD_NUMBER: _ClassVar[int]
    HEAD_S_FIELD_NUMBER: _ClassVar[int]
    fixed_s: float
    layer_s: float
    head_s: float
    def __init__(self, fixed_s: _Optional[float] = ..., layer_s: _Optional[float] = ..., head_s: _Optional[float] = ...) -> None: ...

class EngineSpeed(_message.Message):
    __slots__ = ("engine", "one", "eight", "chunk", "chunk_tokens")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ONE_FIELD_NUMBER: _ClassVar[int]
    EIGHT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    one: ForwardCost
    eight: ForwardCost
    chunk: ForwardCost
    chunk_tokens: int
    def __init__(self, engine: _Optional[str] = ..., one: _Optional[_Union[ForwardCost, _Mapping]] = ..., eight: _Optional[_Union[ForwardCost, _Mapping]] = ..., chunk: _Optional[_Union[ForwardCost, _Mapping]] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class ModelSpeeds(_message.Message):
    __slots__ = ("digest", "engines")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    engines: _containers.RepeatedCompositeFieldContainer[EngineSpeed]
    def __init__(self, digest: _Optional[str] = ..., engines: _Optional[_Iterable[_Union[EngineSpeed, _Mapping]]] = ...) -> None: ...

class PeerInfo(_message.Message):
    __slots__ = ("id", "incarnation", "name", "version", "protocol", "namespace", "addresses", "api_url", "devices", "models", "model_engines", "rdma_ports", "static_rank", "fetches", "files_port", "partial_models", "has_store", "macs", "newest_protocol", "role", "served", "engine_speeds", "on_disk", "unverified")
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    API_URL_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ENGINES_FIELD_NUMBER: _ClassVar[int]
    RDMA_PORTS_FIELD_NUMBER: _ClassVar[int]
    STATIC_RANK_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    FILES_PORT_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_MODELS_FIELD_NUMBER: _ClassVar[int]
    HAS_STORE_FIELD_NUMBER: _ClassVar[int]
    MACS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_SPEEDS_FIELD_NUMBER: _ClassVar[int]
    ON_DISK_FIELD_NUMBER: _ClassVar[int]
    UNVERIFIED_FIELD_NUMBER: _ClassVar[int]
    id: str
    incarnation: int
    name: str
    version: str
    protocol: int
    namespace: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    api_url: str
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    models: _containers.RepeatedScalarFieldContainer[str]
    model_engines: _containers.RepeatedCompositeFieldContainer[ModelEngines]
    rdma_ports: _containers.RepeatedCompositeFieldContainer[RdmaPort]
    static_rank: StaticRank
    fetches: str
    files_port: int
    partial_models: _containers.RepeatedScalarFieldContainer[str]
    has_store: bool
    macs: _containers.RepeatedScalarFieldContainer[str]
    newest_protocol: int
    role: str
    served: _containers.RepeatedCompositeFieldContainer[_plan_pb2.ServedModel]
    engine_speeds: _containers.RepeatedCompositeFieldContainer[ModelSpeeds]
    on_disk: _containers.RepeatedCompositeFieldContainer[ModelOnDisk]
    unverified: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., incarnation: _Optional[int] = ..., name: _Optional[str] = ..., version: _Optional[str] = ..., protocol: _Optional[int] = ..., namespace: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., api_url: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., models: _Optional[_Iterable[str]] = ..., model_engines: _Optional[_Iterable[_Union[ModelEngines, _Mapping]]] = ..., rdma_ports: _Optional[_Iterable[_Union[RdmaPort, _Mapping]]] = ..., static_rank: _Optional[_Union[StaticRank, _Mapping]] = ..., fetches: _Optional[str] = ..., files_port: _Optional[int] = ..., partial_models: _Optional[_Iterable[str]] = ..., has_store: bool = ..., macs: _Optional[_Iterable[str]] = ..., newest_protocol: _Optional[int] = ..., role: _Optional[str] = ..., served: _Optional[_Iterable[_Union[_plan_pb2.ServedModel, _Mapping]]] = ..., engine_speeds: _Optional[_Iterable[_Union[ModelSpeeds, _Mapping]]] = ..., on_disk: _Optional[_Iterable[_Union[ModelOnDisk, _Mapping]]] = ..., unverified: _Optional[_Iterable[str]] = ...) -> None: ...

class ModelOnDisk(_message.Message):
    __slots__ = ("digest", "layers")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    layers: _containers.RepeatedCompositeFieldContainer[_plan_pb2.KeptLayers]
    def __init__(self, digest: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[_plan_pb2.KeptLayers, _Mapping]]] = ...) -> None: ...

class RdmaPort(_message.Message):
    __slots__ = ("device", "active", "uuid", "other_uuid", "speed", "max_queue_pairs", "bridged")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    OTHER_UUID_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_PAIRS_FIELD_NUMBER: _ClassVar[int]
    BRIDGED_FIELD_NUMBER: _ClassVar[int]
    device: str
    active: bool
    uuid: str
    other_uuid: str
    speed: str
    max_queue_pairs: int
    bridged: bool
    def __init__(self, device: _Optional[str] = ..., active: bool = ..., uuid: _Optional[str] = ..., other_uuid: _Optional[str] = ..., speed: _Optional[str] = ..., max_queue_pairs: _Optional[int] = ..., bridged: bool = ...) -> None: ...

class StaticRank(_message.Message):
    __slots__ = ("group", "rank", "size", "backend", "rdma")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    RDMA_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    size: int
    backend: str
    rdma: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ..., backend: _Optional[str] = ..., rdma: _Optional[_Iterable[str]] = ...) -> None: ...

class Telemetry(_message.Message):
    __slots__ = ("peer_id", "sequence", "usable_bytes", "total_bytes", "reserved_bytes", "load", "s_per_gb", "tokens", "outstanding", "reasons", "keys_digest", "fetch_room_bytes", "temperature_c", "power_w", "frames", "draining", "hops", "capacity_bytes", "headroom_bytes", "hardware", "prompt_tokens", "entry_requests", "waiting", "slots", "keeps_hops")
    class SPerGbEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class OutstandingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FramesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PromptTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class WaitingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SlotsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    USABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    S_PER_GB_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    KEYS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FETCH_ROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENTRY_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_HOPS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    sequence: int
    usable_bytes: int
    total_bytes: int
    reserved_bytes: int
    load: float
    s_per_gb: _containers.ScalarMap[str, float]
    tokens: _containers.ScalarMap[str, int]
    outstanding: _containers.ScalarMap[str, int]
    reasons: _containers.RepeatedCompositeFieldContainer[HealthReason]
    keys_digest: int
    fetch_room_bytes: int
    temperature_c: float
    power_w: float
    frames: _containers.ScalarMap[str, int]
    draining: bool
    hops: _containers.RepeatedCompositeFieldContainer[HopReading]
    capacity_bytes: int
    headroom_bytes: int
    hardware: HardwareReading
    prompt_tokens: _containers.ScalarMap[str, int]
    entry_requests: EntryRequests
    waiting: _containers.ScalarMap[str, int]
    slots: _containers.ScalarMap[str, int]
    keeps_hops: bool
    def __init__(self, peer_id: _Optional[str] = ..., sequence: _Optional[int] = ..., usable_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., load: _Optional[float] = ..., s_per_gb: _Optional[_Mapping[str, float]] = ..., tokens: _Optional[_Mapping[str, int]] = ..., outstanding: _Optional[_Mapping[str, int]] = ..., reasons: _Optional[_Iterable[_Union[HealthReason, _Mapping]]] = ..., keys_digest: _Optional[int] = ..., fetch_room_bytes: _Optional[int] = ..., temperature_c: _Optional[float] = ..., power_w: _Optional[float] = ..., frames: _Optional[_Mapping[str, int]] = ..., draining: bool = ..., hops: _Optional[_Iterable[_Union[HopReading, _Mapping]]] = ..., capacity_bytes: _Optional[int] = ..., headroom_bytes: _Optional[int] = ..., hardware: _Optional[_Union[HardwareReading, _Mapping]] = ..., prompt_tokens: _Optional[_Mapping[str, int]] = ..., entry_requests: _Optional[_Union[EntryRequests, _Mapping]] = ..., waiting: _Optional[_Mapping[str, int]] = ..., slots: _Optional[_Mapping[str, int]] = ..., keeps_hops: bool = ...) -> None: ...

class EntryRequests(_message.Message):
    __slots__ = ("running", "awaited")
    class RunningEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    running: _containers.ScalarMap[str, int]
    awaited: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, running: _Optional[_Mapping[str, int]] = ..., awaited: _Optional[_Iterable[str]] = ...) -> None: ...

class HardwareReading(_message.Message):
    __slots__ = ("machine", "accelerators", "machine_digest")
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    ACCELERATORS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    machine: DeviceValues
    accelerators: _containers.RepeatedCompositeFieldContainer[AcceleratorReading]
    machine_digest: int
    def __init__(self, machine: _Optional[_Union[DeviceValues, _Mapping]] = ..., accelerators: _Optional[_Iterable[_Union[AcceleratorReading, _Mapping]]] = ..., machine_digest: _Optional[int] = ...) -> None: ...

class AcceleratorReading(_message.Message):
    __slots__ = ("id", "kind", "vendor", "name", "values")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    VENDOR_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: str
    vendor: str
    name: str
    values: DeviceValues
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[str] = ..., vendor: _Optional[str] = ..., name: _Optional[str] = ..., values: _Optional[_Union[DeviceValues, _Mapping]] = ...) -> None: ...

class DeviceValues(_message.Message):
    __slots__ = ("utilization", "power_w", "temperature_c", "memory_used_bytes", "memory_total_bytes", "mapped_used_bytes", "mapped_total_bytes", "clock_hz", "energy_j", "sources")
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAPPED_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAPPED_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_HZ_FIELD_NUMBER: _ClassVar[int]
    ENERGY_J_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    utilization: float
    power_w: float
    temperature_c: float
    memory_used_bytes: int
    memory_total_bytes: int
    mapped_used_bytes: int
    mapped_total_bytes: int
    clock_hz: float
    energy_j: float
    sources: _containers.RepeatedCompositeFieldContainer[ValueSource]
    def __init__(self, utilization: _Optional[float] = ..., power_w: _Optional[float] = ..., temperature_c: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., mapped_used_bytes: _Optional[int] = ..., mapped_total_bytes: _Optional[int] = ..., clock_hz: _Optional[float] = ..., energy_j: _Optional[float] = ..., sources: _Optional[_Iterable[_Union[ValueSource, _Mapping]]] = ...) -> None: ...

class ValueSource(_message.Message):
    __slots__ = ("source", "values")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    source: str
    values: int
    def __init__(self, source: _Optional[str] = ..., values: _Optional[int] = ...) -> None: ...

class HopReading(_message.Message):
    __slots__ = ("peer_id", "rtt_ms", "mb_per_s", "kind")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    MB_PER_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    rtt_ms: float
    mb_per_s: float
    kind: str
    def __init__(self, peer_id: _Optional[str] = ..., rtt_ms: _Optional[float] = ..., mb_per_s: _Optional[float] = ..., kind: _Optional[str] = ...) -> None: ...

class HealthReason(_message.Message):
    __slots__ = ("code", "level", "message", "remedy")
    CODE_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    code: str
    level: str
    message: str
    remedy: str
    def __init__(self, code: _Optional[str] = ..., level: _Optional[str] = ..., message: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class PeerUpdate(_message.Message):
    __slots__ = ("peer_id", "state", "incarnation", "refutation", "record", "accusers")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REFUTATION_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ACCUSERS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    state: PeerState
    incarnation: int
    refutation: int
    record: Record
    accusers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer_id: _Optional[str] = ..., state: _Optional[_Union[PeerState, str]] = ..., incarnation: _Optional[int] = ..., refutation: _Optional[int] = ..., record: _Optional[_Union[Record, _Mapping]] = ..., accusers: _Optional[_Iterable[str]] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("peer", "refutation")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REFUTATION_FIELD_NUMBER: _ClassVar[int]
    peer: PeerInfo
    refutation: int
    def __init__(self, peer: _Optional[_Union[PeerInfo, _Mapping]] = ..., refutation: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("accepted", "reason", "peer", "refutation", "verdict", "id_in_use_by")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    REFUTATION_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ID_IN_USE_BY_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    peer: PeerInfo
    refutation: int
    verdict: PeerUpdate
    id_in_use_by: str
    def __init__(self, accepted: bool = ..., reason: _Optional[str] = ..., peer: _Optional[_Union[PeerInfo, _Mapping]] = ..., refutation: _Optional[int] = ..., verdict: _Optional[_Union[PeerUpdate, _Mapping]] = ..., id_in_use_by: _Optional[str] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("from_peer", "incarnation", "target", "updates", "records", "telemetry", "prefixes")
    FROM_PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    from_peer: str
    incarnation: int
    target: str
    updates: _containers.RepeatedCompositeFieldContainer[PeerUpdate]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    telemetry: _containers.RepeatedCompositeFieldContainer[Telemetry]
    prefixes: _containers.RepeatedCompositeFieldContainer[PeerPrefixes]
    def __init__(self, from_peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., target: _Optional[str] = ..., updates: _Optional[_Iterable[_Union[PeerUpdate, _Mapping]]] = ..., records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ..., telemetry: _Optional[_Iterable[_Union[Telemetry, _Mapping]]] = ..., prefixes: _Optional[_Iterable[_Union[PeerPrefixes, _Mapping]]] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("unknown_sender", "unix_s", "peer_id", "incarnation", "updates", "records", "telemetry", "view_sum", "fences_sum", "prefixes", "takes_datagrams", "keeps_hops")
    UNKNOWN_SENDER_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    VIEW_SUM_FIELD_NUMBER: _ClassVar[int]
    FENCES_SUM_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    TAKES_DATAGRAMS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_HOPS_FIELD_NUMBER: _ClassVar[int]
    unknown_sender: bool
    unix_s: float
    peer_id: str
    incarnation: int
    updates: _containers.RepeatedCompositeFieldContainer[PeerUpdate]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    telemetry: _containers.RepeatedCompositeFieldContainer[Telemetry]
    view_sum: int
    fences_sum: int
    prefixes: _containers.RepeatedCompositeFieldContainer[PeerPrefixes]
    takes_datagrams: bool
    keeps_hops: bool
    def __init__(self, unknown_sender: bool = ..., unix_s: _Optional[float] = ..., peer_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., updates: _Optional[_Iterable[_Union[PeerUpdate, _Mapping]]] = ..., records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ..., telemetry: _Optional[_Iterable[_Union[Telemetry, _Mapping]]] = ..., view_sum: _Optional[int] = ..., fences_sum: _Optional[int] = ..., prefixes: _Optional[_Iterable[_Union[PeerPrefixes, _Mapping]]] = ..., takes_datagrams: bool = ..., keeps_hops: bool = ...) -> None: ...

class PeerPrefixes(_message.Message):
    __slots__ = ("peer_id", "incarnation", "version", "digests")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    incarnation: int
    version: int
    digests: _containers.ScalarMap[str, bytes]
    def __init__(self, peer_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ..., digests: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class IndirectProbeRequest(_message.Message):
    __slots__ = ("from_peer", "target", "incarnation")
    FROM_PEER_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    from_peer: str
    target: str
    incarnation: int
    def __init__(self, from_peer: _Optional[str] = ..., target: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class IndirectProbeReply(_message.Message):
    __slots__ = ("reached", "refused")
    REACHED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    reached: bool
    refused: bool
    def __init__(self, reached: bool = ..., refused: bool = ...) -> None: ...

class InstanceInfo(_message.Message):
    __slots__ = ("plan", "state", "endpoints", "pids", "reason", "adopted", "automatic")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    AUTOMATIC_FIELD_NUMBER: _ClassVar[int]
    plan: _plan_pb2.Plan
    state: InstanceState
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    pids: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    adopted: _plan_pb2.Ballot
    automatic: bool
    def __init__(self, plan: _Optional[_Union[_plan_pb2.Plan, _Mapping]] = ..., state: _Optional[_Union[InstanceState, str]] = ..., endpoints: _Optional[_Iterable[str]] = ..., pids: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ..., adopted: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ..., automatic: bool = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("kind", "id", "owner", "version", "deleted", "deleted_s", "peer", "instance", "download", "card", "settings")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    DELETED_S_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    id: str
    owner: str
    version: int
    deleted: bool
    deleted_s: float
    peer: PeerInfo
    instance: InstanceInfo
    download: DownloadInfo
    card: CardInfo
    settings: SharedSettings
    def __init__(self, kind: _Optional[str] = ..., id: _Optional[str] = ..., owner: _Optional[str] = ..., version: _Optional[int] = ..., deleted: bool = ..., deleted_s: _Optional[float] = ..., peer: _Optional[_Union[PeerInfo, _Mapping]] = ..., instance: _Optional[_Union[InstanceInfo, _Mapping]] = ..., download: _Optional[_Union[DownloadInfo, _Mapping]] = ..., card: _Optional[_Union[CardInfo, _Mapping]] = ..., settings: _Optional[_Union[SharedSettings, _Mapping]] = ...) -> None: ...

class SharedSettings(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedCompositeFieldContainer[SharedSetting]
    def __init__(self, settings: _Optional[_Iterable[_Union[SharedSetting, _Mapping]]] = ...) -> None: ...

class SharedSetting(_message.Message):
    __slots__ = ("name", "text", "removed", "counter", "author")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: bytes
    removed: bool
    counter: int
    author: str
    def __init__(self, name: _Optional[str] = ..., text: _Optional[bytes] = ..., removed: bool = ..., counter: _Optional[int] = ..., author: _Optional[str] = ...) -> None: ...

class DownloadInfo(_message.Message):
    __slots__ = ("model", "state", "done_bytes", "total_bytes", "bytes_per_s", "eta_s", "layers", "whole", "reason", "remedy", "from_hub_bytes", "from_peers_bytes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    FROM_HUB_BYTES_FIELD_NUMBER: _ClassVar[int]
    FROM_PEERS_BYTES_FIELD_NUMBER: _ClassVar[int]
    model: str
    state: DownloadState
    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    eta_s: float
    layers: LayerRange
    whole: bool
    reason: str
    remedy: str
    from_hub_bytes: int
    from_peers_bytes: int
    def __init__(self, model: _Optional[str] = ..., state: _Optional[_Union[DownloadState, str]] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., bytes_per_s: _Optional[float] = ..., eta_s: _Optional[float] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., whole: bool = ..., reason: _Optional[str] = ..., remedy: _Optional[str] = ..., from_hub_bytes: _Optional[int] = ..., from_peers_bytes: _Optional[int] = ...) -> None: ...

class CardInfo(_message.Message):
    __slots__ = ("toml",)
    TOML_FIELD_NUMBER: _ClassVar[int]
    toml: bytes
    def __init__(self, toml: _Optional[bytes] = ...) -> None: ...

class OwnerSummary(_message.Message):
    __slots__ = ("owner", "state", "incarnation", "refutation", "newest", "digest")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REFUTATION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    owner: str
    state: PeerState
    incarnation: int
    refutation: int
    newest: int
    digest: int
    def __init__(self, owner: _Optional[str] = ..., state: _Optional[_Union[PeerState, str]] = ..., incarnation: _Optional[int] = ..., refutation: _Optional[int] = ..., newest: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("instance_id", "ballot", "left_s")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    ballot: _plan_pb2.Ballot
    left_s: float
    def __init__(self, instance_id: _Optional[str] = ..., ballot: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ..., left_s: _Optional[float] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("from_peer", "incarnation", "digest", "push", "want", "telemetry", "updates", "fences_digest", "fences")
    FROM_PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    FENCES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FENCES_FIELD_NUMBER: _ClassVar[int]
    from_peer: str
    incarnation: int
    digest: int
    push: _containers.RepeatedCompositeFieldContainer[Record]
    want: _containers.RepeatedScalarFieldContainer[str]
    telemetry: _containers.RepeatedCompositeFieldContainer[Telemetry]
    updates: _containers.RepeatedCompositeFieldContainer[PeerUpdate]
    fences_digest: int
    fences: _containers.RepeatedCompositeFieldContainer[Fence]
    def __init__(self, from_peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., digest: _Optional[int] = ..., push: _Optional[_Iterable[_Union[Record, _Mapping]]] = ..., want: _Optional[_Iterable[str]] = ..., telemetry: _Optional[_Iterable[_Union[Telemetry, _Mapping]]] = ..., updates: _Optional[_Iterable[_Union[PeerUpdate, _Mapping]]] = ..., fences_digest: _Optional[int] = ..., fences: _Optional[_Iterable[_Union[Fence, _Mapping]]] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ("unknown_sender", "summary", "newer", "telemetry", "updates", "fences_digest", "fences")
    UNKNOWN_SENDER_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    NEWER_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    FENCES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FENCES_FIELD_NUMBER: _ClassVar[int]
    unknown_sender: bool
    summary: _containers.RepeatedCompositeFieldContainer[OwnerSummary]
    newer: _containers.RepeatedCompositeFieldContainer[Record]
    telemetry: _containers.RepeatedCompositeFieldContainer[Telemetry]
    updates: _containers.RepeatedCompositeFieldContainer[PeerUpdate]
    fences_digest: int
    fences: _containers.RepeatedCompositeFieldContainer[Fence]
    def __init__(self, unknown_sender: bool = ..., summary: _Optional[_Iterable[_Union[OwnerSummary, _Mapping]]] = ..., newer: _Optional[_Iterable[_Union[Record, _Mapping]]] = ..., telemetry: _Optional[_Iterable[_Union[Telemetry, _Mapping]]] = ..., updates: _Optional[_Iterable[_Union[PeerUpdate, _Mapping]]] = ..., fences_digest: _Optional[int] = ..., fences: _Optional[_Iterable[_Union[Fence, _Mapping]]] = ...) -> None: ...

class GoodbyeRequest(_message.Message):
    __slots__ = ("peer_id", "incarnation", "asleep")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    incarnation: int
    asleep: bool
    def __init__(self, peer_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., asleep: bool = ...) -> None: ...

class GoodbyeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeModelRequest(_message.Message):
    __slots__ = ("model", "engine")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    model: str
    engine: str
    def __init__(self, model: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

class DescribeModelReply(_message.Message):
    __slots__ = ("found", "card_json", "error_code", "error_message", "survey_json")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    CARD_JSON_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SURVEY_JSON_FIELD_NUMBER: _ClassVar[int]
    found: bool
    card_json: bytes
    error_code: str
    error_message: str
    survey_json: bytes
    def __init__(self, found: bool = ..., card_json: _Optional[bytes] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., survey_json: _Optional[bytes] = ...) -> None: ...

class SelfTestRequest(_message.Message):
    __slots__ = ("model", "model_digest", "engine", "ranges")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_digest: str
    engine: str
    ranges: _containers.RepeatedCompositeFieldContainer[LayerRange]
    def __init__(self, model: _Optional[str] = ..., model_digest: _Optional[str] = ..., engine: _Optional[str] = ..., ranges: _Optional[_Iterable[_Union[LayerRange, _Mapping]]] = ...) -> None: ...

class LayerRange(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class SelfTestReply(_message.Message):
    __slots__ = ("version", "native_dtype", "results")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NATIVE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    version: str
    native_dtype: str
    results: _containers.RepeatedCompositeFieldContainer[RangeResult]
    def __init__(self, version: _Optional[str] = ..., native_dtype: _Optional[str] = ..., results: _Optional[_Iterable[_Union[RangeResult, _Mapping]]] = ...) -> None: ...

class RangeResult(_message.Message):
    __slots__ = ("range", "outputs", "inputs", "given")
    RANGE_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    range: LayerRange
    outputs: _containers.RepeatedCompositeFieldContainer[NamedValues]
    inputs: _containers.RepeatedCompositeFieldContainer[_plan_pb2.TensorSpec]
    given: _containers.RepeatedCompositeFieldContainer[_plan_pb2.TensorSpec]
    def __init__(self, range: _Optional[_Union[LayerRange, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[NamedValues, _Mapping]]] = ..., inputs: _Optional[_Iterable[_Union[_plan_pb2.TensorSpec, _Mapping]]] = ..., given: _Optional[_Iterable[_Union[_plan_pb2.TensorSpec, _Mapping]]] = ...) -> None: ...

class NamedValues(_message.Message):
    __slots__ = ("name", "values")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    name: str
    values: bytes
    def __init__(self, name: _Optional[str] = ..., values: _Optional[bytes] = ...) -> None: ...

class ReadTextFilesRequest(_message.Message):
    __slots__ = ("model", "takes_image_files", "takes_later_text_files")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TAKES_IMAGE_FILES_FIELD_NUMBER: _ClassVar[int]
    TAKES_LATER_TEXT_FILES_FIELD_NUMBER: _ClassVar[int]
    model: str
    takes_image_files: bool
    takes_later_text_files: bool
    def __init__(self, model: _Optional[str] = ..., takes_image_files: bool = ..., takes_later_text_files: bool = ...) -> None: ...

class TextFile(_message.Message):
    __slots__ = ("name", "chunk")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    name: str
    chunk: bytes
    def __init__(self, name: _Optional[str] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("plan", "stage", "adopt")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    plan: _plan_pb2.Plan
    stage: int
    adopt: _plan_pb2.Ballot
    def __init__(self, plan: _Optional[_Union[_plan_pb2.Plan, _Mapping]] = ..., stage: _Optional[int] = ..., adopt: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("granted", "reason", "usable_bytes", "beaten_by", "never", "collective", "never_code")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    USABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BEATEN_BY_FIELD_NUMBER: _ClassVar[int]
    NEVER_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    NEVER_CODE_FIELD_NUMBER: _ClassVar[int]
    granted: bool
    reason: str
    usable_bytes: int
    beaten_by: _plan_pb2.Ballot
    never: bool
    collective: str
    never_code: str
    def __init__(self, granted: bool = ..., reason: _Optional[str] = ..., usable_bytes: _Optional[int] = ..., beaten_by: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ..., never: bool = ..., collective: _Optional[str] = ..., never_code: _Optional[str] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("instance_id", "ballot", "keep_kv_from", "rank")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    KEEP_KV_FROM_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    ballot: _plan_pb2.Ballot
    keep_kv_from: int
    rank: _plan_pb2.RankWiring
    def __init__(self, instance_id: _Optional[str] = ..., ballot: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ..., keep_kv_from: _Optional[int] = ..., rank: _Optional[_Union[_plan_pb2.RankWiring, _Mapping]] = ...) -> None: ...

class StageStatus(_message.Message):
    __slots__ = ("listening", "loading", "ready", "failed", "hop_lost", "fetching")
    LISTENING_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HOP_LOST_FIELD_NUMBER: _ClassVar[int]
    FETCHING_FIELD_NUMBER: _ClassVar[int]
    listening: StageListening
    loading: StageLoading
    ready: StageReady
    failed: StageFailed
    hop_lost: StageHopLost
    fetching: StageFetching
    def __init__(self, listening: _Optional[_Union[StageListening, _Mapping]] = ..., loading: _Optional[_Union[StageLoading, _Mapping]] = ..., ready: _Optional[_Union[StageReady, _Mapping]] = ..., failed: _Optional[_Union[StageFailed, _Mapping]] = ..., hop_lost: _Optional[_Union[StageHopLost, _Mapping]] = ..., fetching: _Optional[_Union[StageFetching, _Mapping]] = ...) -> None: ...

class StageListening(_message.Message):
    __slots__ = ("endpoint", "pid")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    pid: int
    def __init__(self, endpoint: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class StageLoading(_message.Message):
    __slots__ = ("done", "total")
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    done: int
    total: int
    def __init__(self, done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class StageFetching(_message.Message):
    __slots__ = ("done", "total")
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    done: int
    total: int
    def __init__(self, done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class StageHopLost(_message.Message):
    __slots__ = ("message", "is_out_of_reach")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    IS_OUT_OF_REACH_FIELD_NUMBER: _ClassVar[int]
    message: str
    is_out_of_reach: bool
    def __init__(self, message: _Optional[str] = ..., is_out_of_reach: bool = ...) -> None: ...

class StageReady(_message.Message):
    __slots__ = ("memory_bytes", "load_s", "inputs", "outputs", "resumed", "group")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    load_s: float
    inputs: _containers.RepeatedCompositeFieldContainer[_plan_pb2.TensorSpec]
    outputs: _containers.RepeatedCompositeFieldContainer[_plan_pb2.TensorSpec]
    resumed: int
    group: _runner_pb2.GroupFigures
    def __init__(self, memory_bytes: _Optional[int] = ..., load_s: _Optional[float] = ..., inputs: _Optional[_Iterable[_Union[_plan_pb2.TensorSpec, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[_plan_pb2.TensorSpec, _Mapping]]] = ..., resumed: _Optional[int] = ..., group: _Optional[_Union[_runner_pb2.GroupFigures, _Mapping]] = ...) -> None: ...

class StageFailed(_message.Message):
    __slots__ = ("code", "message", "remedy", "final")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    remedy: str
    final: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., remedy: _Optional[str] = ..., final: bool = ...) -> None: ...

class LinkRequest(_message.Message):
    __slots__ = ("instance_id", "ballot", "next_endpoint", "next_peer", "ranks")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    NEXT_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    NEXT_PEER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    ballot: _plan_pb2.Ballot
    next_endpoint: str
    next_peer: str
    ranks: _containers.RepeatedCompositeFieldContainer[RankEndpoint]
    def __init__(self, instance_id: _Optional[str] = ..., ballot: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ..., next_endpoint: _Optional[str] = ..., next_peer: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[RankEndpoint, _Mapping]]] = ...) -> None: ...

class LinkReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankEndpoint(_message.Message):
    __slots__ = ("endpoint", "peer")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    peer: str
    def __init__(self, endpoint: _Optional[str] = ..., peer: _Optional[str] = ...) -> None: ...

class LookAtStageRequest(_message.Message):
    __slots__ = ("instance_id", "ballot", "shows_hop")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    SHOWS_HOP_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    ballot: _plan_pb2.Ballot
    shows_hop: bool
    def __init__(self, instance_id: _Optional[str] = ..., ballot: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ..., shows_hop: bool = ...) -> None: ...

class LookAtStageReply(_message.Message):
    __slots__ = ("runs", "reason", "held", "usable_bytes", "linked", "rolls_back", "promised")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    USABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINKED_FIELD_NUMBER: _ClassVar[int]
    ROLLS_BACK_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    runs: bool
    reason: str
    held: LayerRange
    usable_bytes: int
    linked: bool
    rolls_back: bool
    promised: _plan_pb2.Ballot
    def __init__(self, runs: bool = ..., reason: _Optional[str] = ..., held: _Optional[_Union[LayerRange, _Mapping]] = ..., usable_bytes: _Optional[int] = ..., linked: bool = ..., rolls_back: bool = ..., promised: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("instance_id", "ballot")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    ballot: _plan_pb2.Ballot
    def __init__(self, instance_id: _Optional[str] = ..., ballot: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "key_id", "instance_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    key_id: str
    instance_id: str
    def __init__(self, request_id: _Optional[str] = ..., key_id: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ("found", "count")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    found: bool
    count: int
    def __init__(self, found: bool = ..., count: _Optional[int] = ...) -> None: ...

class StreamViewer(_message.Message):
    __slots__ = ("key_id", "secret_hash")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_HASH_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    secret_hash: bytes
    def __init__(self, key_id: _Optional[str] = ..., secret_hash: _Optional[bytes] = ...) -> None: ...

class FindStreamsRequest(_message.Message):
    __slots__ = ("viewer", "id")
    VIEWER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    viewer: StreamViewer
    id: str
    def __init__(self, viewer: _Optional[_Union[StreamViewer, _Mapping]] = ..., id: _Optional[str] = ...) -> None: ...

class StreamInfo(_message.Message):
    __slots__ = ("id", "model", "created", "request_ids", "output_tokens", "recipe", "key_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    created: int
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    output_tokens: int
    recipe: bytes
    key_id: str
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., created: _Optional[int] = ..., request_ids: _Optional[_Iterable[str]] = ..., output_tokens: _Optional[int] = ..., recipe: _Optional[bytes] = ..., key_id: _Optional[str] = ...) -> None: ...

class FindStreamsReply(_message.Message):
    __slots__ = ("streams",)
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedCompositeFieldContainer[StreamInfo]
    def __init__(self, streams: _Optional[_Iterable[_Union[StreamInfo, _Mapping]]] = ...) -> None: ...

class FollowStreamRequest(_message.Message):
    __slots__ = ("viewer", "id", "request_id")
    VIEWER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    viewer: StreamViewer
    id: str
    request_id: str
    def __init__(self, viewer: _Optional[_Union[StreamViewer, _Mapping]] = ..., id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("prompt", "events", "phase", "done", "total", "wait_s")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    prompt: _containers.RepeatedCompositeFieldContainer[_driver_pb2.PromptLogprob]
    events: _containers.RepeatedCompositeFieldContainer[_driver_pb2.TokenEvent]
    phase: str
    done: int
    total: int
    wait_s: float
    def __init__(self, prompt: _Optional[_Iterable[_Union[_driver_pb2.PromptLogprob, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[_driver_pb2.TokenEvent, _Mapping]]] = ..., phase: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class ReadKeptRequest(_message.Message):
    __slots__ = ("key_id", "id", "only_one")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ONLY_ONE_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    id: str
    only_one: bool
    def __init__(self, key_id: _Optional[str] = ..., id: _Optional[str] = ..., only_one: bool = ...) -> None: ...

class KeptPart(_message.Message):
    __slots__ = ("id", "key_id", "previous_id", "data", "is_last")
    ID_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    id: str
    key_id: str
    previous_id: str
    data: bytes
    is_last: bool
    def __init__(self, id: _Optional[str] = ..., key_id: _Optional[str] = ..., previous_id: _Optional[str] = ..., data: _Optional[bytes] = ..., is_last: bool = ...) -> None: ...

class DeleteKeptRequest(_message.Message):
    __slots__ = ("key_id", "id")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    id: str
    def __init__(self, key_id: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class DeleteKeptReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class DeleteCardRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class DeleteCardReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class DeleteInstanceRequest(_message.Message):
    __slots__ = ("instance_id", "fence", "replaced")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    REPLACED_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    fence: Fence
    replaced: bool
    def __init__(self, instance_id: _Optional[str] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ..., replaced: bool = ...) -> None: ...

class DeleteInstanceReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class KeepInstanceRequest(_message.Message):
    __slots__ = ("instance_id", "idle_s")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    idle_s: float
    def __init__(self, instance_id: _Optional[str] = ..., idle_s: _Optional[float] = ...) -> None: ...

class KeepInstanceReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class StopNodeRequest(_message.Message):
    __slots__ = ("restart", "node_id")
    RESTART_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    restart: bool
    node_id: str
    def __init__(self, restart: bool = ..., node_id: _Optional[str] = ...) -> None: ...

class StopNodeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("peer_id", "macs", "addresses")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    MACS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    macs: _containers.RepeatedScalarFieldContainer[str]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer_id: _Optional[str] = ..., macs: _Optional[_Iterable[str]] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class WakeReply(_message.Message):
    __slots__ = ("num_networks",)
    NUM_NETWORKS_FIELD_NUMBER: _ClassVar[int]
    num_networks: int
    def __init__(self, num_networks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("on", "node_id")
    ON_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    on: bool
    node_id: str
    def __init__(self, on: bool = ..., node_id: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadLogRequest(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: int
    def __init__(self, records: _Optional[int] = ...) -> None: ...

class ReadLogReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class DiagnoseRequest(_message.Message):
    __slots__ = ("timeline",)
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    timeline: bool
    def __init__(self, timeline: bool = ...) -> None: ...

class DiagnoseReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class ReadTracesRequest(_message.Message):
    __slots__ = ("key_id", "id")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    id: str
    def __init__(self, key_id: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class ReadTracesReply(_message.Message):
    __slots__ = ("traces",)
    TRACES_FIELD_NUMBER: _ClassVar[int]
    traces: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, traces: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DeleteTracesRequest(_message.Message):
    __slots__ = ("trace_ids", "all")
    TRACE_IDS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    trace_ids: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    def __init__(self, trace_ids: _Optional[_Iterable[str]] = ..., all: bool = ...) -> None: ...

class DeleteTracesReply(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class CaptureRequest(_message.Message):
    __slots__ = ("runner",)
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    runner: str
    def __init__(self, runner: _Optional[str] = ...) -> None: ...

class CaptureReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class SharedKey(_message.Message):
    __slots__ = ("id", "role", "salt", "digest", "created", "revoked", "name")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    id: str
    role: str
    salt: str
    digest: str
    created: str
    revoked: str
    name: str
    def __init__(self, id: _Optional[str] = ..., role: _Optional[str] = ..., salt: _Optional[str] = ..., digest: _Optional[str] = ..., created: _Optional[str] = ..., revoked: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ShareKeysRequest(_message.Message):
    __slots__ = ("digest", "keys")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    digest: int
    keys: _containers.RepeatedCompositeFieldContainer[SharedKey]
    def __init__(self, digest: _Optional[int] = ..., keys: _Optional[_Iterable[_Union[SharedKey, _Mapping]]] = ...) -> None: ...

class ShareKeysReply(_message.Message):
    __slots__ = ("digest", "keys")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    digest: int
    keys: _containers.RepeatedCompositeFieldContainer[SharedKey]
    def __init__(self, digest: _Optional[int] = ..., keys: _Optional[_Iterable[_Union[SharedKey, _Mapping]]] = ...) -> None: ...

class IntroduceRequest(_message.Message):
    __slots__ = ("model", "model_digest", "repo", "revision")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REPO_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_digest: str
    repo: str
    revision: str
    def __init__(self, model: _Optional[str] = ..., model_digest: _Optional[str] = ..., repo: _Optional[str] = ..., revision: _Optional[str] = ...) -> None: ...

class IntroduceReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeFilesRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class DescribeFilesReply(_message.Message):
    __slots__ = ("found", "model_digest", "repo", "revision", "files")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REPO_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    found: bool
    model_digest: str
    repo: str
    revision: str
    files: _containers.RepeatedCompositeFieldContainer[FileSpans]
    def __init__(self, found: bool = ..., model_digest: _Optional[str] = ..., repo: _Optional[str] = ..., revision: _Optional[str] = ..., files: _Optional[_Iterable[_Union[FileSpans, _Mapping]]] = ...) -> None: ...

class FileSpans(_message.Message):
    __slots__ = ("name", "size", "sha256", "spans")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    sha256: str
    spans: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., sha256: _Optional[str] = ..., spans: _Optional[_Iterable[int]] = ...) -> None: ...

class PeerLayers(_message.Message):
    __slots__ = ("peer", "layers", "whole")
    PEER_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    layers: LayerRange
    whole: bool
    def __init__(self, peer: _Optional[str] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., whole: bool = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("model", "model_digest", "wants", "hub_user")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    HUB_USER_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_digest: str
    wants: _containers.RepeatedCompositeFieldContainer[PeerLayers]
    hub_user: str
    def __init__(self, model: _Optional[str] = ..., model_digest: _Optional[str] = ..., wants: _Optional[_Iterable[_Union[PeerLayers, _Mapping]]] = ..., hub_user: _Optional[str] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropModelRequest(_message.Message):
    __slots__ = ("model", "files", "staged")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    model: str
    files: bool
    staged: bool
    def __init__(self, model: _Optional[str] = ..., files: bool = ..., staged: bool = ...) -> None: ...

class DropModelReply(_message.Message):
    __slots__ = ("found", "freed_bytes")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    found: bool
    freed_bytes: int
    def __init__(self, found: bool = ..., freed_bytes: _Optional[int] = ...) -> None: ...

class ConfirmRequest(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: str
    def __init__(self, proof: _Optional[str] = ...) -> None: ...

class ConfirmReply(_message.Message):
    __slots__ = ("is_mine",)
    IS_MINE_FIELD_NUMBER: _ClassVar[int]
    is_mine: bool
    def __init__(self, is_mine: bool = ...) -> None: ...

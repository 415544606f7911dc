from exo_mesh.wire.proto import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TlsCredentials(_message.Message):
    __slots__ = ("authority", "certificate", "private_key")
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_KEY_FIELD_NUMBER: _ClassVar[int]
    authority: bytes
    certificate: bytes
    private_key: bytes
    def __init__(self, authority: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., private_key: _Optional[bytes] = ...) -> None: ...

class StartStage(_message.Message):
    __slots__ = ("plan", "stage", "model_dir", "options", "host", "port_first", "port_last", "max_queued", "tls", "rank", "total_bytes", "available_bytes", "max_running", "prefill_chunk", "served", "prefix_bytes", "prefix_disk", "skip_warmup", "draft")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIR_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIRST_FIELD_NUMBER: _ClassVar[int]
    PORT_LAST_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DISK_FIELD_NUMBER: _ClassVar[int]
    SKIP_WARMUP_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    plan: _plan_pb2.Plan
    stage: int
    model_dir: str
    options: _containers.ScalarMap[str, str]
    host: str
    port_first: int
    port_last: int
    max_queued: int
    tls: TlsCredentials
    rank: _plan_pb2.RankWiring
    total_bytes: int
    available_bytes: int
    max_running: int
    prefill_chunk: int
    served: _plan_pb2.ServedModel
    prefix_bytes: int
    prefix_disk: PrefixDisk
    skip_warmup: bool
    draft: str
    def __init__(self, plan: _Optional[_Union[_plan_pb2.Plan, _Mapping]] = ..., stage: _Optional[int] = ..., model_dir: _Optional[str] = ..., options: _Optional[_Mapping[str, str]] = ..., host: _Optional[str] = ..., port_first: _Optional[int] = ..., port_last: _Optional[int] = ..., max_queued: _Optional[int] = ..., tls: _Optional[_Union[TlsCredentials, _Mapping]] = ..., rank: _Optional[_Union[_plan_pb2.RankWiring, _Mapping]] = ..., total_bytes: _Optional[int] = ..., available_bytes: _Optional[int] = ..., max_running: _Optional[int] = ..., prefill_chunk: _Optional[int] = ..., served: _Optional[_Union[_plan_pb2.ServedModel, _Mapping]] = ..., prefix_bytes: _Optional[int] = ..., prefix_disk: _Optional[_Union[PrefixDisk, _Mapping]] = ..., skip_warmup: bool = ..., draft: _Optional[str] = ...) -> None: ...

class PrefixDisk(_message.Message):
    __slots__ = ("directory", "most_bytes", "days", "secret")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAYS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    directory: str
    most_bytes: int
    days: float
    secret: bytes
    def __init__(self, directory: _Optional[str] = ..., most_bytes: _Optional[int] = ..., days: _Optional[float] = ..., secret: _Optional[bytes] = ...) -> None: ...

class LinkNext(_message.Message):
    __slots__ = ("endpoint", "keep_stream")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    KEEP_STREAM_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    keep_stream: bool
    def __init__(self, endpoint: _Optional[str] = ..., keep_stream: bool = ...) -> None: ...

class LinkRanks(_message.Message):
    __slots__ = ("endpoints",)
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, endpoints: _Optional[_Iterable[str]] = ...) -> None: ...

class StopStage(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChangePlan(_message.Message):
    __slots__ = ("plan", "stage", "keep_kv_from")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    KEEP_KV_FROM_FIELD_NUMBER: _ClassVar[int]
    plan: _plan_pb2.Plan
    stage: int
    keep_kv_from: int
    def __init__(self, plan: _Optional[_Union[_plan_pb2.Plan, _Mapping]] = ..., stage: _Optional[int] = ..., keep_kv_from: _Optional[int] = ...) -> None: ...

class Pressure(_message.Message):
    __slots__ = ("level", "free_bytes")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    level: int
    free_bytes: int
    def __init__(self, level: _Optional[int] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class ToRunner(_message.Message):
    __slots__ = ("start", "link", "stop", "tls", "pressure", "change", "ranks", "prepare", "open_hop")
    START_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    OPEN_HOP_FIELD_NUMBER: _ClassVar[int]
    start: StartStage
    link: LinkNext
    stop: StopStage
    tls: TlsCredentials
    pressure: Pressure
    change: ChangePlan
    ranks: LinkRanks
    prepare: Prepare
    open_hop: OpenHop
    def __init__(self, start: _Optional[_Union[StartStage, _Mapping]] = ..., link: _Optional[_Union[LinkNext, _Mapping]] = ..., stop: _Optional[_Union[StopStage, _Mapping]] = ..., tls: _Optional[_Union[TlsCredentials, _Mapping]] = ..., pressure: _Optional[_Union[Pressure, _Mapping]] = ..., change: _Optional[_Union[ChangePlan, _Mapping]] = ..., ranks: _Optional[_Union[LinkRanks, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., open_hop: _Optional[_Union[OpenHop, _Mapping]] = ...) -> None: ...

class OpenHop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("engine",)
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    engine: str
    def __init__(self, engine: _Optional[str] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("import_s", "memory_bytes")
    IMPORT_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    import_s: float
    memory_bytes: int
    def __init__(self, import_s: _Optional[float] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class Listening(_message.Message):
    __slots__ = ("port", "pid")
    PORT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    port: int
    pid: int
    def __init__(self, port: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class Loading(_message.Message):
    __slots__ = ("done", "total")
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    done: int
    total: int
    def __init__(self, done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("memory_bytes", "load_s", "inputs", "outputs", "rolls_back", "group")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ROLLS_BACK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    load_s: float
    inputs: _containers.RepeatedCompositeFieldContainer[_plan_pb2.TensorSpec]
    outputs: _containers.RepeatedCompositeFieldContainer[_plan_pb2.TensorSpec]
    rolls_back: bool
    group: GroupFigures
    def __init__(self, memory_bytes: _Optional[int] = ..., load_s: _Optional[float] = ..., inputs: _Optional[_Iterable[_Union[_plan_pb2.TensorSpec, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[_plan_pb2.TensorSpec, _Mapping]]] = ..., rolls_back: bool = ..., group: _Optional[_Union[GroupFigures, _Mapping]] = ...) -> None: ...

class Changed(_message.Message):
    __slots__ = ("ballot", "resumed")
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    ballot: _plan_pb2.Ballot
    resumed: int
    def __init__(self, ballot: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ..., resumed: _Optional[int] = ...) -> None: ...

class HopLost(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class GroupFigures(_message.Message):
    __slots__ = ("all_reduce_s", "chunk_s", "worst", "deadline_s", "reduce_bytes_per_s", "alone_layer_s", "alone_chunk_s", "kv_heads")
    ALL_REDUCE_S_FIELD_NUMBER: _ClassVar[int]
    CHUNK_S_FIELD_NUMBER: _ClassVar[int]
    WORST_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    REDUCE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ALONE_LAYER_S_FIELD_NUMBER: _ClassVar[int]
    ALONE_CHUNK_S_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    all_reduce_s: float
    chunk_s: float
    worst: float
    deadline_s: float
    reduce_bytes_per_s: float
    alone_layer_s: float
    alone_chunk_s: float
    kv_heads: int
    def __init__(self, all_reduce_s: _Optional[float] = ..., chunk_s: _Optional[float] = ..., worst: _Optional[float] = ..., deadline_s: _Optional[float] = ..., reduce_bytes_per_s: _Optional[float] = ..., alone_layer_s: _Optional[float] = ..., alone_chunk_s: _Optional[float] = ..., kv_heads: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("progress", "frames_in", "frames_out", "bytes_out", "sequences", "memory_bytes", "queued", "running", "tokens", "linked", "busy_s", "lap_p50_s", "lap_p99_s", "laps", "parked", "kv_tokens", "kv_pool_tokens", "evictions", "oldest_wait_s", "laps_saved", "drafts_accepted", "drafts_rejected", "computing_tokens", "computing_prefill", "expected_s", "prefill_frames", "decode_frames", "shared_tokens", "prompts", "laps_took", "hops_took", "queue_waits", "prefill_tokens", "prefill_s", "hop_took", "all_reduce_s", "library", "slots", "is_idle", "hop_rests", "step_all_reduces", "prefix")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_IN_FIELD_NUMBER: _ClassVar[int]
    FRAMES_OUT_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LINKED_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    LAP_P50_S_FIELD_NUMBER: _ClassVar[int]
    LAP_P99_S_FIELD_NUMBER: _ClassVar[int]
    LAPS_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    LAPS_SAVED_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_REJECTED_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_PREFILL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FRAMES_FIELD_NUMBER: _ClassVar[int]
    DECODE_FRAMES_FIELD_NUMBER: _ClassVar[int]
    SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    LAPS_TOOK_FIELD_NUMBER: _ClassVar[int]
    HOPS_TOOK_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAITS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    HOP_TOOK_FIELD_NUMBER: _ClassVar[int]
    ALL_REDUCE_S_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    IS_IDLE_FIELD_NUMBER: _ClassVar[int]
    HOP_RESTS_FIELD_NUMBER: _ClassVar[int]
    STEP_ALL_REDUCES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    progress: int
    frames_in: int
    frames_out: int
    bytes_out: int
    sequences: int
    memory_bytes: int
    queued: int
    running: int
    tokens: int
    linked: bool
    busy_s: float
    lap_p50_s: float
    lap_p99_s: float
    laps: int
    parked: int
    kv_tokens: int
    kv_pool_tokens: int
    evictions: int
    oldest_wait_s: float
    laps_saved: int
    drafts_accepted: _containers.RepeatedScalarFieldContainer[int]
    drafts_rejected: _containers.RepeatedScalarFieldContainer[int]
    computing_tokens: int
    computing_prefill: bool
    expected_s: float
    prefill_frames: int
    decode_frames: int
    shared_tokens: int
    prompts: int
    laps_took: Durations
    hops_took: Durations
    queue_waits: Durations
    prefill_tokens: int
    prefill_s: float
    hop_took: Durations
    all_reduce_s: float
    library: LibraryMemory
    slots: int
    is_idle: bool
    hop_rests: bool
    step_all_reduces: int
    prefix: PrefixFigures
    def __init__(self, progress: _Optional[int] = ..., frames_in: _Optional[int] = ..., frames_out: _Optional[int] = ..., bytes_out: _Optional[int] = ..., sequences: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., tokens: _Optional[int] = ..., linked: bool = ..., busy_s: _Optional[float] = ..., lap_p50_s: _Optional[float] = ..., lap_p99_s: _Optional[float] = ..., laps: _Optional[int] = ..., parked: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., kv_pool_tokens: _Optional[int] = ..., evictions: _Optional[int] = ..., oldest_wait_s: _Optional[float] = ..., laps_saved: _Optional[int] = ..., drafts_accepted: _Optional[_Iterable[int]] = ..., drafts_rejected: _Optional[_Iterable[int]] = ..., computing_tokens: _Optional[int] = ..., computing_prefill: bool = ..., expected_s: _Optional[float] = ..., prefill_frames: _Optional[int] = ..., decode_frames: _Optional[int] = ..., shared_tokens: _Optional[int] = ..., prompts: _Optional[int] = ..., laps_took: _Optional[_Union[Durations, _Mapping]] = ..., hops_took: _Optional[_Union[Durations, _Mapping]] = ..., queue_waits: _Optional[_Union[Durations, _Mapping]] = ..., prefill_tokens: _Optional[int] = ..., prefill_s: _Optional[float] = ..., hop_took: _Optional[_Union[Durations, _Mapping]] = ..., all_reduce_s: _Optional[float] = ..., library: _Optional[_Union[LibraryMemory, _Mapping]] = ..., slots: _Optional[int] = ..., is_idle: bool = ..., hop_rests: bool = ..., step_all_reduces: _Optional[int] = ..., prefix: _Optional[_Union[PrefixFigures, _Mapping]] = ...) -> None: ...

class PrefixFigures(_message.Message):
    __slots__ = ("hits", "misses", "hit_tokens", "evictions", "kept_tokens", "kept", "bytes", "is_on", "disk_is_on", "disk_hits", "disk_hit_tokens", "disk_misses", "disk_known", "disk_files", "disk_bytes", "disk_writes", "disk_errors", "disk_problem", "has_disk", "digest")
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_ON_FIELD_NUMBER: _ClassVar[int]
    DISK_IS_ON_FIELD_NUMBER: _ClassVar[int]
    DISK_HITS_FIELD_NUMBER: _ClassVar[int]
    DISK_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_MISSES_FIELD_NUMBER: _ClassVar[int]
    DISK_KNOWN_FIELD_NUMBER: _ClassVar[int]
    DISK_FILES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_WRITES_FIELD_NUMBER: _ClassVar[int]
    DISK_ERRORS_FIELD_NUMBER: _ClassVar[int]
    DISK_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    HAS_DISK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    hits: int
    misses: int
    hit_tokens: int
    evictions: int
    kept_tokens: int
    kept: int
    bytes: int
    is_on: bool
    disk_is_on: bool
    disk_hits: int
    disk_hit_tokens: int
    disk_misses: int
    disk_known: int
    disk_files: int
    disk_bytes: int
    disk_writes: int
    disk_errors: int
    disk_problem: str
    has_disk: bool
    digest: bytes
    def __init__(self, hits: _Optional[int] = ..., misses: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., evictions: _Optional[int] = ..., kept_tokens: _Optional[int] = ..., kept: _Optional[int] = ..., bytes: _Optional[int] = ..., is_on: bool = ..., disk_is_on: bool = ..., disk_hits: _Optional[int] = ..., disk_hit_tokens: _Optional[int] = ..., disk_misses: _Optional[int] = ..., disk_known: _Optional[int] = ..., disk_files: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_writes: _Optional[int] = ..., disk_errors: _Optional[int] = ..., disk_problem: _Optional[str] = ..., has_disk: bool = ..., digest: _Optional[bytes] = ...) -> None: ...

class LibraryMemory(_message.Message):
    __slots__ = ("source", "active_bytes", "cache_bytes", "peak_bytes", "limit_bytes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    source: str
    active_bytes: int
    cache_bytes: int
    peak_bytes: int
    limit_bytes: int
    def __init__(self, source: _Optional[str] = ..., active_bytes: _Optional[int] = ..., cache_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ...) -> None: ...

class Durations(_message.Message):
    __slots__ = ("counts", "sum_s")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_S_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum_s: float
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., sum_s: _Optional[float] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class FromRunner(_message.Message):
    __slots__ = ("listening", "loading", "ready", "heartbeat", "failed", "changed", "hop_lost", "prepared")
    LISTENING_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    HOP_LOST_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    listening: Listening
    loading: Loading
    ready: Ready
    heartbeat: Heartbeat
    failed: Failed
    changed: Changed
    hop_lost: HopLost
    prepared: Prepared
    def __init__(self, listening: _Optional[_Union[Listening, _Mapping]] = ..., loading: _Optional[_Union[Loading, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., changed: _Optional[_Union[Changed, _Mapping]] = ..., hop_lost: _Optional[_Union[HopLost, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ...) -> None: ...

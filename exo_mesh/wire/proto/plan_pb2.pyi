from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Ballot(_message.Message):
    __slots__ = ("counter", "proposer")
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    counter: int
    proposer: str
    def __init__(self, counter: _Optional[int] = ..., proposer: _Optional[str] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("model", "start", "stop", "num_layers")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    start: int
    stop: int
    num_layers: int
    def __init__(self, model: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., num_layers: _Optional[int] = ...) -> None: ...

class StagePlan(_message.Message):
    __slots__ = ("peer_id", "engine", "shard", "reserve_bytes", "group")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    RESERVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    engine: str
    shard: Shard
    reserve_bytes: int
    group: TensorGroup
    def __init__(self, peer_id: _Optional[str] = ..., engine: _Optional[str] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ..., reserve_bytes: _Optional[int] = ..., group: _Optional[_Union[TensorGroup, _Mapping]] = ...) -> None: ...

class TensorGroup(_message.Message):
    __slots__ = ("backend", "peers", "rdma")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    RDMA_FIELD_NUMBER: _ClassVar[int]
    backend: str
    peers: _containers.RepeatedScalarFieldContainer[str]
    rdma: _containers.RepeatedCompositeFieldContainer[RdmaRow]
    def __init__(self, backend: _Optional[str] = ..., peers: _Optional[_Iterable[str]] = ..., rdma: _Optional[_Iterable[_Union[RdmaRow, _Mapping]]] = ...) -> None: ...

class RdmaRow(_message.Message):
    __slots__ = ("devices",)
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, devices: _Optional[_Iterable[str]] = ...) -> None: ...

class RankWiring(_message.Message):
    __slots__ = ("backend", "rank", "endpoints", "rdma")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    RDMA_FIELD_NUMBER: _ClassVar[int]
    backend: str
    rank: int
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    rdma: _containers.RepeatedCompositeFieldContainer[RdmaRow]
    def __init__(self, backend: _Optional[str] = ..., rank: _Optional[int] = ..., endpoints: _Optional[_Iterable[str]] = ..., rdma: _Optional[_Iterable[_Union[RdmaRow, _Mapping]]] = ...) -> None: ...

class PlanCandidate(_message.Message):
    __slots__ = ("peer_id", "usable_bytes", "on_disk")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    USABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ON_DISK_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    usable_bytes: int
    on_disk: _containers.RepeatedCompositeFieldContainer[KeptLayers]
    def __init__(self, peer_id: _Optional[str] = ..., usable_bytes: _Optional[int] = ..., on_disk: _Optional[_Iterable[_Union[KeptLayers, _Mapping]]] = ...) -> None: ...

class KeptLayers(_message.Message):
    __slots__ = ("engine", "start", "stop", "tokens", "activation_dtype", "rank", "size", "keys")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_DTYPE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    start: int
    stop: int
    tokens: int
    activation_dtype: str
    rank: int
    size: int
    keys: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, engine: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., tokens: _Optional[int] = ..., activation_dtype: _Optional[str] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ..., keys: _Optional[_Iterable[int]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("instance_id", "ballot", "model", "model_digest", "stages", "context_limit", "candidates", "policy", "min_peers", "pool_tokens", "activation_dtype", "pool_sequences")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    MIN_PEERS_FIELD_NUMBER: _ClassVar[int]
    POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_DTYPE_FIELD_NUMBER: _ClassVar[int]
    POOL_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    ballot: Ballot
    model: str
    model_digest: str
    stages: _containers.RepeatedCompositeFieldContainer[StagePlan]
    context_limit: int
    candidates: _containers.RepeatedCompositeFieldContainer[PlanCandidate]
    policy: str
    min_peers: int
    pool_tokens: int
    activation_dtype: str
    pool_sequences: int
    def __init__(self, instance_id: _Optional[str] = ..., ballot: _Optional[_Union[Ballot, _Mapping]] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[StagePlan, _Mapping]]] = ..., context_limit: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[PlanCandidate, _Mapping]]] = ..., policy: _Optional[str] = ..., min_peers: _Optional[int] = ..., pool_tokens: _Optional[int] = ..., activation_dtype: _Optional[str] = ..., pool_sequences: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "item_shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ITEM_SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    item_shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., item_shape: _Optional[_Iterable[int]] = ...) -> None: ...

class ServedModel(_message.Message):
    __slots__ = ("name", "engine", "server", "served_name", "stands_for", "context_limit", "slots")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SERVED_NAME_FIELD_NUMBER: _ClassVar[int]
    STANDS_FOR_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    engine: str
    server: str
    served_name: str
    stands_for: str
    context_limit: int
    slots: int
    def __init__(self, name: _Optional[str] = ..., engine: _Optional[str] = ..., server: _Optional[str] = ..., served_name: _Optional[str] = ..., stands_for: _Optional[str] = ..., context_limit: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...

from exo_mesh.proto import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RingHello(_message.Message):
    __slots__ = ("protocol", "instance_id", "ballot", "from_stage")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    FROM_STAGE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    instance_id: str
    ballot: _plan_pb2.Ballot
    from_stage: int
    def __init__(self, protocol: _Optional[int] = ..., instance_id: _Optional[str] = ..., ballot: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ..., from_stage: _Optional[int] = ...) -> None: ...

class RingAck(_message.Message):
    __slots__ = ("last_step",)
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    last_step: int
    def __init__(self, last_step: _Optional[int] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("sequence", "pos0", "n", "num_logits")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POS0_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGITS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    pos0: int
    n: int
    num_logits: int
    def __init__(self, sequence: _Optional[int] = ..., pos0: _Optional[int] = ..., n: _Optional[int] = ..., num_logits: _Optional[int] = ...) -> None: ...

class InsertOp(_message.Message):
    __slots__ = ("sequence", "max_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    max_tokens: int
    def __init__(self, sequence: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class RemoveOp(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class ShutdownOp(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Op(_message.Message):
    __slots__ = ("insert", "remove", "shutdown")
    INSERT_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    SHUTDOWN_FIELD_NUMBER: _ClassVar[int]
    insert: InsertOp
    remove: RemoveOp
    shutdown: ShutdownOp
    def __init__(self, insert: _Optional[_Union[InsertOp, _Mapping]] = ..., remove: _Optional[_Union[RemoveOp, _Mapping]] = ..., shutdown: _Optional[_Union[ShutdownOp, _Mapping]] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("sequence", "stage", "code", "message")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stage: int
    code: str
    message: str
    def __init__(self, sequence: _Optional[int] = ..., stage: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("ballot", "step", "batch", "rows", "token_ids", "ops", "tensors", "faults", "free_blocks")
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ballot: _plan_pb2.Ballot
    step: int
    batch: int
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    ops: _containers.RepeatedCompositeFieldContainer[Op]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    faults: _containers.RepeatedCompositeFieldContainer[Fault]
    free_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ballot: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ..., step: _Optional[int] = ..., batch: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ..., ops: _Optional[_Iterable[_Union[Op, _Mapping]]] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., faults: _Optional[_Iterable[_Union[Fault, _Mapping]]] = ..., free_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

from exo_mesh.wire.proto import plan_pb2 as _plan_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RingHello(_message.Message):
    __slots__ = ("protocol", "instance_id", "ballot", "from_stage", "newest_protocol", "wants_lap")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    FROM_STAGE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WANTS_LAP_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    instance_id: str
    ballot: _plan_pb2.Ballot
    from_stage: int
    newest_protocol: int
    wants_lap: bool
    def __init__(self, protocol: _Optional[int] = ..., instance_id: _Optional[str] = ..., ballot: _Optional[_Union[_plan_pb2.Ballot, _Mapping]] = ..., from_stage: _Optional[int] = ..., newest_protocol: _Optional[int] = ..., wants_lap: bool = ...) -> None: ...

class RingAck(_message.Message):
    __slots__ = ("last_step", "pressure", "kv_tokens", "at_once")
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    last_step: int
    pressure: int
    kv_tokens: int
    at_once: bool
    def __init__(self, last_step: _Optional[int] = ..., pressure: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., at_once: bool = ...) -> None: ...

from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PathProbeRequest(_message.Message):
    __slots__ = ("reply_bytes",)
    REPLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    reply_bytes: int
    def __init__(self, reply_bytes: _Optional[int] = ...) -> None: ...

class PathProbeReply(_message.Message):
    __slots__ = ("peer_id", "payload")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    payload: bytes
    def __init__(self, peer_id: _Optional[str] = ..., payload: _Optional[bytes] = ...) -> None: ...

"""Frames as the raw messages of a ring stream (protos/exo_mesh/proto/ring.proto says the layout).

A message is a tag byte and its body. Tensor bytes follow the header as they are: they are never put into a protobuf
`bytes` field, and a frame that fits one message is read without a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from exo_mesh.domain.frame import Fault, Frame, Insert, Op, Remove, Row, Shutdown
from exo_mesh.domain.tensor import ITEM_BYTES, Tensor
from exo_mesh.errors import TransportError
from exo_mesh.proto import ring_pb2 as pb
from exo_mesh.transport.plan_codec import ballot_from_proto, ballot_to_proto

MAX_MESSAGE_BYTES = 1024 * 1024
"""Longest message. 1 MiB was the fastest size between 64 KiB and 16 MiB on loopback."""

MAX_FRAME_BYTES = 512 * 1024 * 1024
"""Most tensor bytes of one frame: what a peer may make another one allocate."""

MAX_HEADER_BYTES = 512 * 1024

_FRAME, _TENSOR, _HELLO, _ACK = b"F", b"T", b"H", b"A"
_HEADER_LENGTH = struct.Struct("<I")
_Message = TypeVar("_Message", pb.RingHello, pb.RingAck)


def encode_frame(frame: Frame) -> list[bytes]:
    """The messages that carry a frame, in order."""
    header = _header(frame).SerializeToString()
    prefix = _FRAME + _HEADER_LENGTH.pack(len(header)) + header
    views = [memoryview(tensor.data) for tensor in frame.tensors.values()]
    total = len(prefix) + sum(view.nbytes for view in views)
    if total <= MAX_MESSAGE_BYTES:
        return [b"".join([prefix, *views])]
    return [prefix, *(_TENSOR + piece for view in views for piece in _pieces(view))]


def _pieces(view: memoryview) -> Iterator[memoryview]:
    """Cut a byte view into parts that fit a message behind its tag byte."""
    size = MAX_MESSAGE_BYTES - len(_TENSOR)
    flat = view.cast("B")
    for start in range(0, flat.nbytes, size):
        yield flat[start : start + size]


class FrameAssembler:
    """Builds frames from the messages of one stream. Any malformed message raises TransportError."""

    def __init__(self) -> None:
        self._header: pb.FrameHeader | None = None
        self._buffer = memoryview(b"")
        self._filled = 0

    def feed(self, message: bytes) -> Frame | None:
        """Take the next message; answer the frame that it completes, if it does."""
        tag = message[:1]
        if tag == _FRAME:
            return self._begin(message)
        if tag == _TENSOR:
            return self._continue(message)
        raise TransportError(f"unexpected message {tag!r} on a ring stream")

    def _begin(self, message: bytes) -> Frame | None:
        if self._header is not None:
            raise TransportError("a frame began before the one before it was complete")
        header, body = _split_header(message)
        total = _tensor_bytes(header)
        if len(body) == total:
            return _frame(header, body)
        if len(body) > total:
            raise TransportError(f"{len(body)} tensor bytes where the header announces {total}")
        # np.empty, because a bytearray would first be zeroed
        self._header, self._buffer, self._filled = header, np.empty(total, np.uint8).data, 0
        return self._fill(body)

    def _continue(self, message: bytes) -> Frame | None:
        if self._header is None:
            raise TransportError("tensor bytes without a frame header")
        return self._fill(memoryview(message)[1:])

    def _fill(self, piece: memoryview) -> Frame | None:
        stop = self._filled + len(piece)
        if stop > len(self._buffer):
            raise TransportError(f"{stop} tensor bytes where the header announces {len(self._buffer)}")
        self._buffer[self._filled : stop] = piece
        self._filled = stop
        if stop < len(self._buffer) or self._header is None:
            return None
        frame = _frame(self._header, self._buffer)
        self._header, self._buffer = None, memoryview(b"")
        return frame


def encode_hello(hello: pb.RingHello) -> bytes:
    return _HELLO + hello.SerializeToString()


def decode_hello(message: bytes) -> pb.RingHello:
    """Raises TransportError if this is no hello."""
    return _parse(message, _HELLO, pb.RingHello())


def encode_ack(last_step: int) -> bytes:
    return _ACK + pb.RingAck(last_step=last_step).SerializeToString()


def decode_ack(message: bytes) -> int:
    """The step up to which all frames have arrived. Raises TransportError if this is no ack."""
    return _parse(message, _ACK, pb.RingAck()).last_step


def _parse(message: bytes, tag: bytes, into: _Message) -> _Message:
    if message[:1] != tag or len(message) > MAX_HEADER_BYTES:
        raise TransportError(f"expected a message {tag!r} on a ring stream, got {message[:1]!r}")
    try:
        into.ParseFromString(message[1:])
    except DecodeError as exc:
        raise TransportError(f"malformed message {tag!r} on a ring stream") from exc
    return into


def _split_header(message: bytes) -> tuple[pb.FrameHeader, memoryview]:
    if len(message) < 5:
        raise TransportError("a frame message is shorter than its length field")
    (size,) = _HEADER_LENGTH.unpack_from(message, 1)
    if size > MAX_HEADER_BYTES or 5 + size > len(message):
        raise TransportError(f"a frame header of {size} bytes does not fit its message of {len(message)}")
    header = pb.FrameHeader()
    try:
        header.ParseFromString(message[5 : 5 + size])
    except DecodeError as exc:
        raise TransportError("malformed frame header") from exc
    return header, memoryview(message)[5 + size :]


def _tensor_bytes(header: pb.FrameHeader) -> int:
    """Tensor bytes that the header announces; refuses unknown dtypes and more than MAX_FRAME_BYTES."""
    total = 0
    for spec in header.tensors:
        if spec.dtype not in ITEM_BYTES:
            raise TransportError(f"tensor {spec.name!r} has unknown dtype {spec.dtype!r}")
        total += _spec_bytes(spec)
    if total > MAX_FRAME_BYTES:
        raise TransportError(f"a frame of {total} tensor bytes exceeds {MAX_FRAME_BYTES}")
    return total


def _spec_bytes(spec: pb.TensorSpec) -> int:
    size = ITEM_BYTES[spec.dtype]
    for length in spec.shape:
        size *= length
    return size


def _header(frame: Frame) -> pb.FrameHeader:
    return pb.FrameHeader(
        ballot=ballot_to_proto(frame.ballot),
        step=frame.step,
        batch=frame.batch,
        rows=[
            pb.Row(sequence=row.sequence, pos0=row.pos0, n=row.n, num_logits=row.num_logits) for row in frame.rows
        ],
        token_ids=frame.token_ids,
        ops=[_op_to_proto(op) for op in frame.ops],
        tensors=[
            pb.TensorSpec(name=name, dtype=tensor.dtype, shape=tensor.shape) for name, tensor in frame.tensors.items()
        ],
        faults=[
            pb.Fault(sequence=fault.sequence, stage=fault.stage, code=fault.code, message=fault.message)
            for fault in frame.faults
        ],
        free_blocks=frame.free_blocks,
    )


def _frame(header: pb.FrameHeader, body: memoryview) -> Frame:
    tensors: dict[str, Tensor] = {}
    start = 0
    for spec in header.tensors:
        stop = start + _spec_bytes(spec)
        tensors[spec.name] = Tensor(spec.dtype, tuple(spec.shape), body[start:stop])
        start = stop
    try:
        return Frame(
            ballot=ballot_from_proto(header.ballot),
            step=header.step,
            batch=header.batch,
            rows=tuple(Row(row.sequence, row.pos0, row.n, row.num_logits) for row in header.rows),
            token_ids=tuple(header.token_ids),
            ops=tuple(_op_from_proto(op) for op in header.ops),
            tensors=tensors,
            faults=tuple(Fault(f.sequence, f.stage, f.code, f.message) for f in header.faults),
            free_blocks=tuple(header.free_blocks),
        )
    except ValueError as exc:
        raise TransportError(f"inconsistent frame: {exc}") from exc


def _op_to_proto(op: Op) -> pb.Op:
    match op:
        case Insert():
            return pb.Op(insert=pb.InsertOp(sequence=op.sequence, max_tokens=op.max_tokens))
        case Remove():
            return pb.Op(remove=pb.RemoveOp(sequence=op.sequence))
        case Shutdown():
            return pb.Op(shutdown=pb.ShutdownOp())


def _op_from_proto(message: pb.Op) -> Op:
    match message.WhichOneof("op"):
        case "insert":
            return Insert(message.insert.sequence, message.insert.max_tokens)
        case "remove":
            return Remove(message.remove.sequence)
        case "shutdown":
            return Shutdown()
        case unknown:
            raise TransportError(f"a frame carries an unknown op {unknown!r}")

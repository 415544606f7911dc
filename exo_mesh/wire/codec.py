"""Encodes frames as the raw messages of a ring stream. A message is a tag byte and its body:

    H  RingHello (protobuf)                    the first message of the client
    F  u32 length, frame header, tensor bytes  a frame begins
    T  tensor bytes                            the frame continues
    A  RingAck (protobuf)                      from the server: all frames up to this step have arrived

The frame header is msgpack: with protobuf, encoding and decoding it took a third of a hop
(docs/measurements/hop.md). Tensor bytes follow unchanged. A frame that fits one message is read without copying
them, so all but the longest frames are one message; the others are cut into pieces.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np

from exo_mesh.base.printable import printable
from exo_mesh.domain.frame import Fault, Frame, MemoryStatus, Op, RingHello, Row, StageReport, UnknownOp
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.tensor import ITEM_BYTES, Tensor
from exo_mesh.wire.incoming import MalformedError, read_message
from exo_mesh.wire.message_codec import Codec
from exo_mesh.wire.proto import ring_pb2 as pb

MAX_WHOLE_BYTES = 8 * 1024 * 1024
"""Most tensor bytes of a frame that is one message: 512 tokens of 8,192 values in 16 bits. Beyond that, the copy that
one message saves costs as much in gRPC, whose own copies then miss the CPU's cache."""

MAX_PIECE_BYTES = 1024 * 1024
"""Longest message of a frame that is cut into pieces. 1 MiB was the fastest size between 64 KiB and 16 MiB on
loopback."""

MAX_FRAME_BYTES = 512 * 1024 * 1024
"""Most tensor bytes of one frame, and so the most memory that a peer can make another one allocate."""

MAX_HEADER_BYTES = 512 * 1024
MAX_DIMENSIONS = 8

_FRAME, _TENSOR, _HELLO, _ACK = b"F", b"T", b"H", b"A"
_HEADER_LENGTH = struct.Struct("<I")
_Size = Annotated[int, msgspec.Meta(ge=0)]
_Message = TypeVar("_Message", pb.RingHello, pb.RingAck)

HELLO = Codec(RingHello, pb.RingHello)


def encode_frame(frame: Frame) -> Iterable[bytes]:
    """The messages that carry a frame, in order. Messages of a long frame are created on demand, so that each is sent
    while it is in the CPU cache."""
    header = _encoder.encode(_header(frame))
    prefix = _FRAME + _HEADER_LENGTH.pack(len(header)) + header
    if not frame.tensors:
        return (prefix,)
    views = [memoryview(tensor.data) for tensor in frame.tensors.values()]
    if sum([view.nbytes for view in views]) <= MAX_WHOLE_BYTES:
        return (b"".join([prefix, *views]),)
    return _long_frame(prefix, views)


def _long_frame(prefix: bytes, views: list[memoryview]) -> Iterator[bytes]:
    yield prefix
    for view in views:
        for piece in _pieces(view):
            yield _TENSOR + piece


def _pieces(view: memoryview) -> Iterator[memoryview]:
    """Cuts a byte view into parts that fit into a message after its tag byte."""
    size = MAX_PIECE_BYTES - len(_TENSOR)
    flat = view.cast("B")
    for start in range(0, flat.nbytes, size):
        yield flat[start : start + size]


class FrameAssembler:
    """Builds frames from the messages of one stream. A malformed message raises MalformedError before memory is
    allocated for the sizes that it announces."""

    def __init__(self) -> None:
        self._header: _Header | None = None
        self._buffer = memoryview(b"")
        self._filled = 0

    def feed(self, message: bytes) -> Frame | None:
        """Process the next message; returns the frame that it completes, if any."""
        tag = message[:1]
        if tag == _FRAME:
            return self._begin(message)
        if tag == _TENSOR:
            return self._continue(message)
        raise MalformedError(f'unexpected message "{printable(tag.decode("latin-1"))}" on a ring stream')

    def _begin(self, message: bytes) -> Frame | None:
        if self._header is not None:
            raise MalformedError("a frame began before the one before it was complete")
        header, body = _split_header(message)
        total = _tensor_bytes(header)
        if len(body) == total:
            return _frame(header, body)
        if len(body):  # a long frame begins with a message that has only the header
            raise MalformedError(f"{len(body)} tensor bytes, but the header announces {total}")
        # np.empty, because a bytearray would first be zeroed.
        self._header, self._buffer, self._filled = header, np.empty(total, np.uint8).data, 0
        return None

    def _continue(self, message: bytes) -> Frame | None:
        if self._header is None:
            raise MalformedError("tensor bytes without a frame header")
        return self._fill(memoryview(message)[1:])

    def _fill(self, piece: memoryview) -> Frame | None:
        stop = self._filled + len(piece)
        if stop > len(self._buffer):
            raise MalformedError(f"{stop} tensor bytes, but the header announces {len(self._buffer)}")
        self._buffer[self._filled : stop] = piece
        self._filled = stop
        if stop < len(self._buffer) or self._header is None:
            return None
        frame = _frame(self._header, self._buffer)
        self._header, self._buffer = None, memoryview(b"")
        return frame


def encode_hello(hello: RingHello) -> bytes:
    return _HELLO + HELLO.write(hello).SerializeToString()


def decode_hello(message: bytes) -> RingHello:
    """Raises MalformedError if this is not a hello."""
    return HELLO.read(_parse(message, _HELLO, pb.RingHello))


class Acknowledged(NamedTuple):
    """An acknowledgement: all frames up to last_step have arrived. status: the receiver's memory status. at_once: it
    was written before any computation, so that its sender can time the hop; older peers never set it."""

    last_step: int
    status: MemoryStatus
    at_once: bool = False


def encode_ack(last_step: int, status: MemoryStatus | None = None, *, at_once: bool = False) -> bytes:
    """status: set only by a rank that follows the leader of its tensor group."""
    ack = pb.RingAck(last_step=last_step, at_once=at_once)
    if status is not None:
        ack.pressure, ack.kv_tokens = status
    return _ACK + ack.SerializeToString()


def decode_ack(message: bytes) -> Acknowledged:
    """Raises MalformedError if this is not an acknowledgement."""
    ack = _parse(message, _ACK, pb.RingAck)
    kv_tokens = ack.kv_tokens if ack.HasField("kv_tokens") else MemoryStatus().kv_tokens
    return Acknowledged(ack.last_step, MemoryStatus(ack.pressure, kv_tokens), ack.at_once)


def _parse(message: bytes, tag: bytes, into: type[_Message]) -> _Message:
    if message[:1] != tag or len(message) > MAX_HEADER_BYTES:
        raise MalformedError(f'expected message "{tag.decode()}", got "{printable(message[:1].decode("latin-1"))}"')
    return read_message(into, message[1:])


def _split_header(message: bytes) -> tuple[_Header, memoryview]:
    if len(message) < 5:
        raise MalformedError("a frame message is shorter than its length field")
    (size,) = _HEADER_LENGTH.unpack_from(message, 1)
    if size > MAX_HEADER_BYTES or 5 + size > len(message):
        raise MalformedError(f"a frame header of {size} bytes does not fit its message of {len(message)}")
    view = memoryview(message)
    try:
        return _decoder.decode(view[5 : 5 + size]), view[5 + size :]
    except msgspec.DecodeError as exc:
        newer = _newer_header(view[5 : 5 + size])
        if newer is None:
            raise MalformedError(f"malformed frame header: {exc}") from exc
        return newer, view[5 + size :]


def _newer_header(data: memoryview) -> _Header | None:
    """The header of a frame with operations of a newer version; None if it is malformed. Called only after the fast
    decoder has failed."""
    try:
        fields = msgspec.msgpack.decode(data)
        sent = fields[_OPS]
        header = msgspec.convert([*fields[:_OPS], [], *fields[_OPS + 1 :]], _Header)
        ops = tuple(_op(one) for one in sent)
    except (msgspec.DecodeError, RecursionError, TypeError, IndexError, KeyError):
        return None
    return msgspec.structs.replace(header, ops=ops)


def _op(sent: Any) -> Op | UnknownOp:
    """Raises msgspec.ValidationError if this is not an operation of any version."""
    if isinstance(sent, list) and len(sent) > 1 and sent[0] not in _OP_NAMES:
        name, sequence, *rest = sent
        return UnknownOp(printable(msgspec.convert(name, str), 64), msgspec.convert(sequence, int), tuple(rest))
    op: Op = msgspec.convert(sent, Op)
    return op


def _tensor_bytes(header: _Header) -> int:
    """Number of tensor bytes that the header announces. Raises MalformedError for unknown dtypes and above
    MAX_FRAME_BYTES."""
    total = 0
    for spec in header.tensors:
        if spec.dtype not in ITEM_BYTES:
            raise MalformedError(
                f'tensor "{printable(spec.name, 64)}" has the unknown dtype "{printable(spec.dtype, 64)}"'
            )
        total += _spec_bytes(spec)
    if total > MAX_FRAME_BYTES:
        raise MalformedError(f"a frame of {total} tensor bytes exceeds {MAX_FRAME_BYTES}")
    return total


def _spec_bytes(spec: _TensorSpec) -> int:
    size = ITEM_BYTES[spec.dtype]
    for length in spec.shape:
        size *= length
    return size


class _TensorSpec(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]


class _Header(msgspec.Struct, array_like=True):
    """A frame without its tensor bytes, which follow in the order of `tensors`. The order of these fields is the wire
    format. reserved: 0; older nodes send the number of a batch there, which no stage reads."""

    counter: int
    proposer: str
    step: int
    reserved: int
    rows: tuple[Row, ...]
    token_ids: tuple[int, ...]
    ops: tuple[Op, ...]
    tensors: list[_TensorSpec]
    faults: tuple[Fault, ...]
    reports: tuple[StageReport, ...]
    upto: _Size = 0
    is_chunk: bool = False


_OPS = _Header.__struct_fields__.index("ops")
_OP_NAMES = {one.__name__ for one in get_args(Op)}
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def _header(frame: Frame) -> _Header:
    return _Header(
        frame.ballot.counter,
        frame.ballot.proposer,
        frame.step,
        0,
        frame.rows,
        frame.token_ids,
        _ops_as_sent(frame.ops),
        [_TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in frame.tensors.items()],
        frame.faults,
        frame.reports,
        frame.upto,
        frame.is_chunk,
    )


def _ops_as_sent(ops: tuple[Op | UnknownOp, ...]) -> tuple[Any, ...]:
    if not ops or not any(isinstance(op, UnknownOp) for op in ops):
        return ops
    return tuple(op.as_sent if isinstance(op, UnknownOp) else op for op in ops)


def _frame(header: _Header, body: memoryview) -> Frame:
    tensors: dict[str, Tensor] = {}
    start = 0
    for spec in header.tensors:
        stop = start + _spec_bytes(spec)
        tensors[spec.name] = Tensor(spec.dtype, spec.shape, body[start:stop])
        start = stop
    try:
        frame = Frame(
            Ballot(header.counter, header.proposer),
            header.step,
            header.rows,
            header.token_ids,
            header.ops,
            tensors,
            tuple(map(_printable_fault, header.faults)),
            header.reports,
            header.upto,
            header.is_chunk,
        )
        frame.check()
    except ValueError as exc:
        raise MalformedError(f"inconsistent frame: {exc}") from exc
    return frame


def _printable_fault(fault: Fault) -> Fault:
    return Fault(fault.sequence, fault.stage, printable(fault.code, 64), printable(fault.message))

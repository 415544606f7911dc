"""Encodes and reads probe datagrams. Pure.

    question  "Q", token, incarnation of the asked peer (u64), length (u16), ProbeRequest, zeros up to QUESTION_BYTES
    answer    "A", token of the question, ProbeReply; or "C", token: there is more to say, call instead

Every question has the same length, and no answer is longer, so that nobody can make a node send more than it receives.
"""

from __future__ import annotations

import secrets
import struct

import msgspec
from google.protobuf.message import DecodeError

from exo_mesh.errors import TransportError
from exo_mesh.security.probe_seal import OVERHEAD_BYTES
from exo_mesh.wire.proto import control_pb2 as pb

MAX_DATAGRAM_BYTES = 1200
"""Fits one packet of every link that IPv6 may use (1,280 bytes), with its headers. A probe with telemetry has 300 to
1,050 bytes; a longer one is a call."""

QUESTION_BYTES = MAX_DATAGRAM_BYTES - OVERHEAD_BYTES
TOKEN_BYTES = 16

_QUESTION, _ANSWER, _CALL = b"Q", b"A", b"C"
_HEAD = struct.Struct(">QH")
_ROOM = QUESTION_BYTES - 1 - TOKEN_BYTES - _HEAD.size

MAX_READING_BYTES = _ROOM - 146
"""Longest telemetry reading that fits a question and an answer. The other fields of a question without news have up to
146 bytes, 66 of them for each of two ids, and those of an answer 116."""


class ProbeQuestion(msgspec.Struct, frozen=True):
    """token: 16 random bytes that the answer repeats. incarnation: the start of the asked node that is meant; a later
    start does not answer."""

    token: bytes
    incarnation: int
    request: pb.ProbeRequest


class ProbeAnswer(msgspec.Struct, frozen=True):
    """reply: None if the asked node has more to say than fits a datagram, and wants to be called."""

    token: bytes
    reply: pb.ProbeReply | None


def new_token() -> bytes:
    return secrets.token_bytes(TOKEN_BYTES)


def fits(request: pb.ProbeRequest) -> bool:
    """Whether a probe may be a datagram. A probe with news is a call, because news must not be lost."""
    has_news = request.updates or request.records or request.prefixes
    return not has_news and request.ByteSize() <= _ROOM


def encode_question(question: ProbeQuestion) -> bytes:
    """The payload of a question, whose request must fit."""
    body: bytes = question.request.SerializeToString()
    payload = _QUESTION + question.token + _HEAD.pack(question.incarnation, len(body)) + body
    return payload.ljust(QUESTION_BYTES, b"\0")


def encode_answer(token: bytes, reply: pb.ProbeReply | None) -> bytes:
    """The payload of an answer. It asks for a call if there is no reply, or the reply does not fit."""
    body: bytes = b"" if reply is None else reply.SerializeToString()
    payload = _ANSWER + token + body
    return _CALL + token if reply is None or len(payload) > QUESTION_BYTES else payload


def decode(payload: bytes) -> ProbeQuestion | ProbeAnswer:
    """Reads a question or an answer. Raises TransportError for anything else."""
    kind, token, rest = payload[:1], payload[1 : 1 + TOKEN_BYTES], payload[1 + TOKEN_BYTES :]
    if len(payload) > QUESTION_BYTES or len(token) != TOKEN_BYTES:
        raise TransportError("not a probe")
    try:
        if kind == _QUESTION and len(payload) == QUESTION_BYTES:
            return _question(token, rest)
        if kind == _ANSWER:
            return ProbeAnswer(token, pb.ProbeReply.FromString(rest))
    except DecodeError as exc:
        raise TransportError("a probe that cannot be read") from exc
    if kind == _CALL and not rest:
        return ProbeAnswer(token, None)
    raise TransportError("not a probe")


def _question(token: bytes, rest: bytes) -> ProbeQuestion:
    incarnation, length = _HEAD.unpack_from(rest)
    if length > _ROOM:
        raise TransportError("a probe that is longer than its datagram")
    request = pb.ProbeRequest.FromString(rest[_HEAD.size : _HEAD.size + length])
    if not fits(request):
        raise TransportError("a probe with news, which must be a call")
    return ProbeQuestion(token, incarnation, request)

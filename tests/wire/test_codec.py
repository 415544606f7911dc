"""Frames survive the wire, and nothing malformed gets through it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.domain.frame import (
    ANY_POSITION,
    HIDDEN,
    Copy,
    Fault,
    Frame,
    Insert,
    Keep,
    Remove,
    Retain,
    Row,
    StageReport,
)
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.tensor import ITEM_BYTES, Tensor
from exo_mesh.errors import TransportError
from exo_mesh.wire.codec import MAX_PIECE_BYTES, MAX_WHOLE_BYTES, FrameAssembler, encode_frame
from exo_mesh.wire.incoming import MalformedError

BALLOT = Ballot(3, "proposer")
ids = st.integers(0, 2**31)
positions = st.integers(0, ANY_POSITION)
seconds = st.floats(0, 1e6)


texts = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60)
"""Codes are cut at 64 characters, and what is not printable is replaced."""


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = ITEM_BYTES[dtype] * int(np.prod(shape, dtype=int))
    return Tensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    rows = tuple(
        Row(sequence, pos0, n, num_logits=draw(st.integers(0, n)), drafted=draw(st.booleans()))
        for sequence, pos0, n in draw(st.lists(st.tuples(ids, ids, st.integers(1, 5)), max_size=4))
    )
    total = sum(row.n for row in rows)
    retain = st.builds(Retain, st.lists(ids, max_size=3).map(tuple))
    copy = st.builds(Copy, ids, ids, ids, ids, st.integers(0, 9))
    report = st.builds(StageReport, seconds, seconds, st.integers(0, 2), ids, ids, st.booleans(), cut_tokens=positions)
    ends = st.builds(Remove, ids) | st.builds(Keep, ids)
    op = st.one_of(st.builds(Insert, ids, ids), copy, ends, retain)
    return Frame(
        ballot=BALLOT,
        step=draw(ids),
        rows=rows,
        token_ids=tuple(draw(st.lists(ids, min_size=total, max_size=total))),
        ops=tuple(draw(st.lists(op, max_size=3))),
        tensors=draw(st.dictionaries(st.text(max_size=5), tensors(), max_size=3)),
        faults=tuple(draw(st.lists(st.builds(Fault, ids, st.integers(0, 9), texts, texts), max_size=2))),
        reports=tuple(draw(st.lists(report, max_size=3))),
        upto=draw(st.integers(0, 9)),
    )


def carried(frame: Frame) -> Frame | None:
    assembler = FrameAssembler()
    answers = [assembler.feed(message) for message in encode_frame(frame)]
    assert answers[:-1] == [None] * (len(answers) - 1)
    return answers[-1]


@given(frames())
def test_a_frame_arrives_as_it_was_sent(frame: Frame) -> None:
    assert carried(frame) == frame


class ReportBefore(msgspec.Struct, array_like=True):
    """What a node of the version before reads and sends of a stage's report."""

    compute_s: float
    waited_s: float
    pressure: int = 0
    kv_tokens: int = 2**31
    kept_tokens: int = 2**31
    cuts_back: bool = True
    disk: None = None
    shares_from: int = 0
    shared_tokens: int = 0
    slack_tokens: int = 0


class RowBefore(msgspec.Struct, array_like=True):
    """The same of a row."""

    sequence: int
    pos0: int
    n: int
    num_logits: int = 0
    num_hidden: int = 0
    second: int = 0


@pytest.mark.parametrize(("anywhere", "least"), [(True, ANY_POSITION), (False, 0)])
def test_a_report_of_the_version_before_says_all_positions_or_none(anywhere: bool, least: int) -> None:
    sent = msgspec.msgpack.encode(ReportBefore(0.1, 0.2, cuts_back=anywhere))
    report = msgspec.msgpack.decode(sent, type=StageReport)
    assert (report.cuts_back, report.cuts_at_rows) == (least, False)
    assert not msgspec.msgpack.decode(msgspec.msgpack.encode(RowBefore(1, 2, 3)), type=Row).drafted


@pytest.mark.parametrize(
    ("anywhere", "tokens", "least"), [(True, ANY_POSITION, ANY_POSITION), (False, 16, 16), (False, 0, 0)]
)
def test_the_version_before_reads_whether_all_positions_can_be_cut_back(
    anywhere: bool, tokens: int, least: int
) -> None:
    report = StageReport(0.1, 0.2, cuts_anywhere=anywhere, cut_tokens=tokens, cuts_at_rows=not anywhere)
    assert report.cuts_back == least
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=ReportBefore).cuts_back == anywhere
    row = msgspec.msgpack.decode(msgspec.msgpack.encode(Row(1, 2, 3, 3, drafted=True)), type=RowBefore)
    assert (row.pos0, row.n, row.num_logits) == (2, 3, 3)


def test_a_chunk_of_a_prompt_is_one_message_whose_bytes_are_used_as_they_are() -> None:
    payload = bytes(range(256)) * (MAX_WHOLE_BYTES // 256)
    frame = chunk(payload)
    (message,) = encode_frame(frame)
    arrived = FrameAssembler().feed(message)
    assert arrived is not None and arrived == frame
    assert memoryview(arrived.tensors[HIDDEN].data).obj is message


def test_a_longer_frame_travels_in_pieces_of_bounded_length() -> None:
    frame = chunk(bytes(range(256)) * (MAX_WHOLE_BYTES // 256 + 1))
    messages = list(encode_frame(frame))
    assert len(messages) > MAX_WHOLE_BYTES // MAX_PIECE_BYTES
    assert max(map(len, messages)) <= MAX_PIECE_BYTES
    assert carried(frame) == frame


def test_a_frame_in_pieces_below_the_limit_is_read_as_older_peers_send_it() -> None:
    frame = chunk(bytes(range(256)) * 16)
    (message,) = encode_frame(frame)
    header, body = message[:-4096], message[-4096:]
    assembler = FrameAssembler()
    assert [assembler.feed(one) for one in (header, b"T" + body[:1000])] == [None, None]
    assert assembler.feed(b"T" + body[1000:]) == frame


def chunk(payload: bytes) -> Frame:
    """A frame of two tokens with this payload."""
    tensor = Tensor("uint8", (2, len(payload) // 2), payload)
    return Frame(BALLOT, 1, (Row(1, 0, 2),), (7, 8), tensors={HIDDEN: tensor})


def test_a_decode_frame_costs_little_more_than_its_activations() -> None:
    hidden = Tensor("bfloat16", (1, 4096), bytes(8192))
    (message,) = encode_frame(Frame(BALLOT, 9, (Row(7, 100, 1, 1),), (42,), tensors={HIDDEN: hidden}))
    assert len(message) < 8192 + 128


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_random_bytes_are_a_transport_error_or_no_frame_at_all(messages: list[bytes]) -> None:
    assembler = FrameAssembler()
    for message in messages:
        try:
            assembler.feed(message)
        except TransportError:
            return


@given(st.data())
def test_a_damaged_frame_never_raises_anything_but_a_transport_error(data: st.DataObject) -> None:
    (message,) = encode_frame(data.draw(frames()))
    position = data.draw(st.integers(0, len(message) - 1))
    damaged = bytearray(message)
    damaged[position] ^= data.draw(st.integers(1, 255))
    try:
        FrameAssembler().feed(bytes(damaged))
    except TransportError:
        return


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([b"T1234"], "without a frame header"),
        ([b"F\x01"], "shorter than its length field"),
        ([b"F\xff\xff\xff\x7f"], "does not fit"),
        ([b"X"], "unexpected message"),
    ],
)
def test_what_is_wrong_is_said(messages: list[bytes], complaint: str) -> None:
    assembler = FrameAssembler()
    with pytest.raises(TransportError, match=complaint):
        for message in messages:
            assembler.feed(message)


def test_a_header_cannot_make_the_receiver_allocate_without_bound() -> None:
    header = msgspec.msgpack.encode([1, "p", 1, 0, [], [], [], [[HIDDEN, "float32", [2**31, 8]]], [], []])
    with pytest.raises(TransportError, match="exceeds"):
        FrameAssembler().feed(b"F" + len(header).to_bytes(4, "little") + header)


@pytest.mark.parametrize("body", [b"\0" * 4, b"\0" * 12])
def test_a_tensor_of_other_bytes_than_its_shape_needs_is_refused_before_memory_is_taken(body: bytes) -> None:
    spec = [HIDDEN, "float32", [1, 2]]
    header = msgspec.msgpack.encode([1, "p", 1, 0, [[1, 0, 1]], [7], [], [spec], [], []])
    assembler = FrameAssembler()
    with pytest.raises(MalformedError, match="8"):
        assembler.feed(b"F" + len(header).to_bytes(4, "little") + header + body)
    assert len(assembler._buffer) == 0


def test_what_a_stage_says_of_a_fault_is_printable() -> None:
    frame = Frame(BALLOT, 1, faults=(Fault(1, 0, "engine_error", "\x1b[31mEVIL\nforged"),))
    arrived = carried(frame)
    assert arrived is not None and arrived.faults[0].message == "\ufffd[31mEVIL\ufffdforged"

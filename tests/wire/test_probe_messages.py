"""Probe datagrams: what is written is read again, all else is refused, and no answer is longer than a question."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_mesh.errors import TransportError
from exo_mesh.security.probe_seal import ProbeSeal
from exo_mesh.wire.probes.messages import (
    MAX_DATAGRAM_BYTES,
    QUESTION_BYTES,
    ProbeAnswer,
    ProbeQuestion,
    decode,
    encode_answer,
    encode_question,
    fits,
    new_token,
)
from exo_mesh.wire.probes.turns import FIRST_PAUSE_S, LONGEST_PAUSE_S, DatagramTurns
from exo_mesh.wire.proto import control_pb2 as pb


def request(name: str = "a") -> pb.ProbeRequest:
    return pb.ProbeRequest(from_peer=name, incarnation=3, target="b", telemetry=[pb.Telemetry()])


@settings(max_examples=50)
@given(st.text(max_size=200), st.integers(0, 2**64 - 1))
def test_a_question_is_read_as_it_was_written(name: str, incarnation: int) -> None:
    question = ProbeQuestion(new_token(), incarnation, request(name))
    payload = encode_question(question)
    assert len(payload) == QUESTION_BYTES
    assert decode(payload) == question
    assert len(ProbeSeal(b"k" * 32).close(payload)) == MAX_DATAGRAM_BYTES


@settings(max_examples=50)
@given(st.integers(0, 40))
def test_no_answer_is_longer_than_a_question_and_a_long_one_asks_for_a_call(num_readings: int) -> None:
    reply = pb.ProbeReply(peer_id="b" * 32, telemetry=[pb.Telemetry(peer_id="b" * 32)] * num_readings)
    token = new_token()
    payload = encode_answer(token, reply)
    has_room = reply.ByteSize() + 17 <= QUESTION_BYTES
    assert len(payload) <= QUESTION_BYTES
    assert decode(payload) == ProbeAnswer(token, reply if has_room else None)


def test_an_answer_without_a_reply_asks_for_a_call() -> None:
    assert decode(encode_answer(b"t" * 16, None)) == ProbeAnswer(b"t" * 16, None)


@pytest.mark.parametrize(
    "news",
    [
        pb.ProbeRequest(updates=[pb.PeerUpdate()]),
        pb.ProbeRequest(records=[pb.Record()]),
        pb.ProbeRequest(prefixes=[pb.PeerPrefixes()]),
        pb.ProbeRequest(from_peer="x" * QUESTION_BYTES),
    ],
    ids=["updates", "records", "prefixes", "too long"],
)
def test_a_probe_with_news_or_too_long_is_a_call(news: pb.ProbeRequest) -> None:
    assert not fits(news)
    assert fits(request())
    if news.ByteSize() < 100:
        with pytest.raises(TransportError):
            decode(encode_question(ProbeQuestion(new_token(), 1, news)))


def check_garbage(data: bytes) -> None:
    with suppress(TransportError):
        assert isinstance(decode(data), ProbeQuestion | ProbeAnswer)


@settings(max_examples=100)
@given(st.binary(max_size=1500), st.sampled_from([b"", b"Q", b"A", b"C"]))
def test_garbage_is_refused_and_never_anything_worse(data: bytes, kind: bytes) -> None:
    check_garbage(kind + data)


@pytest.mark.extended
@settings(max_examples=3000)
@given(st.binary(min_size=1, max_size=40), st.integers(0, QUESTION_BYTES - 1))
def test_a_question_with_overwritten_bytes_is_read_or_refused(piece: bytes, at: int) -> None:
    payload = encode_question(ProbeQuestion(new_token(), 1, request()))
    check_garbage((payload[:at] + piece + payload[at + len(piece) :])[:QUESTION_BYTES])


def test_datagrams_begin_after_an_answered_call_of_a_peer_that_takes_them() -> None:
    turns = DatagramTurns()
    assert not turns.may_ask(0.0)
    turns.called(7, takes_datagrams=False)
    assert not turns.may_ask(0.0)
    turns.called(7, takes_datagrams=True)
    assert turns.may_ask(0.0)
    assert turns.incarnation == 7


def test_a_failed_call_ends_datagrams_until_a_probe_by_call_is_answered() -> None:
    turns = DatagramTurns()
    turns.called(7, takes_datagrams=True)
    turns.call_failed()
    turns.answered()
    assert not turns.may_ask(1e9)
    turns.called(7, takes_datagrams=True)
    assert turns.may_ask(0.0)


def test_each_loss_in_a_row_doubles_the_time_in_which_probes_are_calls() -> None:
    turns, now, pauses = DatagramTurns(), 0.0, []
    turns.called(7, takes_datagrams=True)
    for _ in range(12):
        turns.missed(now)
        pause_s = FIRST_PAUSE_S
        while not turns.may_ask(now + pause_s):
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        assert not turns.may_ask(now + 0.99 * pause_s)
        pauses.append(pause_s)
        now += pause_s
    assert pauses == [1, 2, 4, 8, 16, 32, *[60] * 6]
    turns.answered()
    turns.missed(now)
    assert turns.may_ask(now + FIRST_PAUSE_S)

"""Readings that list too many hops for a datagram: each datagram fits, a peer learns all hops, and keeps those that a
datagram leaves out."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from exo_mesh.domain.device import MAX_HOPS, HopReading, Telemetry
from exo_mesh.mesh.membership.records import Records
from exo_mesh.wire.probes.messages import (
    MAX_READING_BYTES,
    ProbeAnswer,
    ProbeQuestion,
    decode,
    encode_answer,
    encode_question,
    fits,
)
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.readings import Reading, ShortReadings, reading_from_proto, reading_to_proto
from tests.mesh.membership.meshes import Peer, until
from tests.mesh.membership.test_datagram_probing import num_answered, pair

OTHERS = [f"{number:064}" for number in range(16)]
"""Ids of the greatest length."""


def hops(peer_ids: list[str], rtt_ms: float = 1.5) -> tuple[HopReading, ...]:
    return tuple(HopReading(peer_id, rtt_ms, 940.123, "thunderbolt") for peer_id in peer_ids)


def reading(sequence: int = 1, peer_ids: list[str] = OTHERS, rtt_ms: float = 1.5) -> Reading:
    return Reading.of(Telemetry("a" * 64, sequence, 2**40, 2**40, 2**40, 0.1, hops=hops(peer_ids, rtt_ms)))


def records() -> Records:
    """Of a node that knows the reporter and all others."""
    alive = {"a" * 64, *OTHERS}
    return Records("own", 1, lambda peer_id: 1 if peer_id in alive else None)


def listed(reading: Reading) -> set[str]:
    return {hop.peer_id for hop in reading.value.hops}


@pytest.mark.parametrize("num_hops", [14, 16, 64])
def test_a_question_and_an_answer_with_a_short_reading_fit_a_datagram(num_hops: int) -> None:
    long = reading_to_proto(reading())
    long.hops.extend(pb.HopReading(peer_id=f"{number:064}", kind="thunderbolt") for number in range(16, num_hops))
    short = reading_to_proto(ShortReadings().next(reading_from_proto(long), MAX_READING_BYTES))
    request = pb.ProbeRequest(from_peer="a" * 64, incarnation=2**64 - 1, target="b" * 64, telemetry=[short])
    assert fits(request)
    assert decode(encode_question(ProbeQuestion(b"t" * 16, 1, request))) == ProbeQuestion(b"t" * 16, 1, request)
    reply = pb.ProbeReply(
        peer_id="a" * 64, incarnation=2**64 - 1, unix_s=1.5, takes_datagrams=True, keeps_hops=True, view_sum=2**64 - 1,
        fences_sum=2**64 - 1, telemetry=[short],
    )  # fmt: skip
    assert decode(encode_answer(b"t" * 16, reply)) == ProbeAnswer(b"t" * 16, reply)


def test_two_short_readings_list_all_hops_of_sixteen_peers() -> None:
    turns = ShortReadings()
    first, second = (turns.next(reading(sequence), MAX_READING_BYTES) for sequence in (1, 2))
    assert first.keeps_hops and second.keeps_hops
    assert listed(first) != listed(second)
    assert listed(first) | listed(second) == set(OTHERS)


def test_the_same_reading_is_shortened_in_the_same_way() -> None:
    turns = ShortReadings()
    assert turns.next(reading(7), MAX_READING_BYTES) == turns.next(reading(7), MAX_READING_BYTES)


def test_a_reading_that_fits_or_has_no_room_for_a_hop_is_not_shortened() -> None:
    fitting = reading(1, OTHERS[:4])
    assert ShortReadings().next(fitting, MAX_READING_BYTES) is fitting
    message = reading_to_proto(reading())
    message.reasons.add(code="c", message="m" * MAX_READING_BYTES)
    full = reading_from_proto(message)
    assert ShortReadings().next(full, MAX_READING_BYTES) is full


def test_a_peer_keeps_the_hops_that_a_short_reading_leaves_out() -> None:
    held, turns = records(), ShortReadings()
    held.take_reading(reading(1))
    short = turns.next(reading(2, rtt_ms=9.0), MAX_READING_BYTES)
    held.take_reading(short)
    rtts = {hop.peer_id: hop.rtt_ms for hop in held.telemetry["a" * 64].hops}
    assert rtts == {one: 9.0 if one in listed(short) else 1.5 for one in OTHERS}
    held.take_reading(turns.next(reading(3, rtt_ms=9.0), MAX_READING_BYTES))
    assert {hop.rtt_ms for hop in held.telemetry["a" * 64].hops} == {9.0}
    assert len(held.telemetry["a" * 64].hops) == len(OTHERS)


def test_a_completed_reading_is_passed_on_whole_with_what_is_unknown_here() -> None:
    held = records()
    held.take_reading(reading(1))
    short = reading_to_proto(ShortReadings().next(reading(2), MAX_READING_BYTES))
    short.MergeFromString(b"\xc0\x0c\x01")  # field 200
    held.take_reading(reading_from_proto(short))
    passed_on = held.readings["a" * 64]
    assert listed(passed_on) == set(OTHERS)
    assert not passed_on.keeps_hops
    assert b"\xc0\x0c\x01" in reading_to_proto(passed_on).SerializeToString()


def test_a_reading_of_an_older_version_replaces_all_hops() -> None:
    held = records()
    held.take_reading(reading(1))
    held.take_reading(reading(2, OTHERS[:3]))
    assert [hop.peer_id for hop in held.telemetry["a" * 64].hops] == OTHERS[:3]
    held.take_reading(reading(3, []))
    assert held.telemetry["a" * 64].hops == ()


def test_hops_to_peers_that_are_gone_are_not_kept_and_no_more_than_a_reading_may_have() -> None:
    alive = {"a" * 64, *OTHERS, *(f"new{number}" for number in range(16))}
    held = Records("own", 1, lambda peer_id: 1 if peer_id in alive else None)
    held.take_reading(reading(1))
    alive.remove(OTHERS[3])
    held.take_reading(reading_from_proto(pb.Telemetry(peer_id="a" * 64, sequence=2, keeps_hops=True)))
    assert [hop.peer_id for hop in held.telemetry["a" * 64].hops] == [*OTHERS[:3], *OTHERS[4:]]
    flood = pb.Telemetry(peer_id="a" * 64, sequence=3, keeps_hops=True)
    flood.hops.extend(pb.HopReading(peer_id=f"new{number}") for number in range(10))
    held.take_reading(reading_from_proto(flood))
    assert len(held.telemetry["a" * 64].hops) == MAX_HOPS


def report(peer: Peer, rtt_ms: float) -> None:
    """Let a peer report hops to the other one and to 15 more, too many for a datagram."""
    others = [*"ab".replace(peer.membership.own.id, ""), *OTHERS[1:]]
    peer.reading = replace(peer.reading, sequence=peer.reading.sequence + 1, hops=hops(others, rtt_ms))


async def test_peers_with_many_hops_probe_by_datagrams_and_learn_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.mesh.membership.news.OWN_READING_S", 0.0)
    async with pair() as peers:
        other = peers[1]
        await until(lambda: all(peer.membership.peers[0].takes_short_readings for peer in peers))
        for rtt_ms in (2.5, 7.5):
            learnt: set[str] = set()

            def has_all(rtt_ms: float = rtt_ms, learnt: set[str] = learnt) -> bool:
                for peer in peers:
                    report(peer, rtt_ms)
                found = other.membership.telemetry["a"].hops if "a" in other.membership.telemetry else ()
                learnt |= {hop.peer_id for hop in found if hop.rtt_ms == rtt_ms}
                return learnt == {"b", *OTHERS[1:]}

            await until(has_all)
        for _ in range(100):  # rounds of ten datagrams, until the machine is quick enough for one without a call
            calls, answered = [peer.num_calls for peer in peers], num_answered(peers)
            await until(lambda answered=answered: min(num_answered(peers)) >= max(answered) + 10)
            if calls == [peer.num_calls for peer in peers]:
                return
        pytest.fail(f"no ten datagrams without a call: {calls}")


async def test_a_peer_of_an_older_version_is_sent_the_whole_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.mesh.membership.news.OWN_READING_S", 0.0)
    async with pair() as peers:
        report(peers[0], 2.5)
        news, peer = peers[0].membership._news, peers[0].membership.peers[0]
        for takes_short, num_hops in ((False, {16}), (True, set(range(5, 16)))):
            peer.takes_short_readings = takes_short
            [sent] = news.datagram_readings(peer)
            assert len(sent.value.hops) in num_hops and sent.keeps_hops is takes_short

"""Peers find, admit and lose each other, and agree on the view."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest
from msgspec.structs import replace

from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.view import InstanceInfo, InstanceState
from exo_mesh.errors import TransportError
from exo_mesh.mesh.membership.calls import PROBE
from exo_mesh.mesh.membership.messages import HelloRequest
from exo_mesh.mesh.membership.swim import Life, SwimState, Update
from exo_mesh.wire.control_client import ControlClient
from exo_mesh.wire.peer_call import AnyRow
from tests.mesh.membership import meshes
from tests.mesh.membership.meshes import FAST, Peer, mesh, peer_info, until


def an_instance(owner: str) -> InstanceInfo:
    stage = StagePlan(owner, "dummy", Shard("m", 0, 4, 4), 10)
    plan = Plan("m-1", Ballot(1, owner), "m", "d", (stage,), 64, PlanInputs(((owner, 10),), "memory", 1))
    return InstanceInfo(plan, InstanceState.READY, ("127.0.0.1:1",), (7,))


def digests(peers: list[Peer]) -> set[str]:
    return {peer.membership.view.digest() for peer in peers}


async def test_peers_that_know_one_address_come_to_know_all() -> None:
    async with mesh("a", "b", "c", "d") as peers:
        await until(lambda: len(digests(peers)) == 1)
        assert [peer.id for peer in peers[0].membership.view.peers()] == ["a", "b", "c", "d"]
        await until(lambda: all(peer.membership.telemetry.keys() == {"a", "b", "c", "d"} for peer in peers))


async def test_a_peer_that_a_filter_does_not_name_never_appears_though_a_friend_knows_both() -> None:
    picky, friend, other = Peer(peer_info("a"), only_peers=("name-b",)), Peer(peer_info("b")), Peer(peer_info("c"))
    peers = [await peer.start() for peer in (picky, friend, other)]
    try:
        for peer in (picky, other):
            peer.membership.suggest(friend.address)
        other.membership.suggest(picky.address)
        await until(lambda: len(friend.membership.peers) == 2)
        await until(lambda: picky.membership.refusals and picky.membership.peers)
        assert [peer.id for peer in picky.membership.peers] == ["b"]
        assert "the --node-id-filter of name-a does not name it" in "".join(picky.membership.refusals)
    finally:
        for peer in peers:
            await peer.stop()


async def test_an_address_on_a_filtered_kind_of_link_is_never_dialled() -> None:
    peers = [await Peer(peer_info("a"), only_links=("ethernet",)).start(), await Peer(peer_info("b")).start()]
    try:
        peers[0].membership.suggest(peers[1].address)
        assert not peers[0].membership._dialer._dialing
        peers[1].membership.suggest(peers[0].address)
        await until(lambda: peers[1].membership.refusals)
        assert "none of its addresses is on ethernet" in "".join(peers[1].membership.refusals)
        assert not any(peer.membership.peers for peer in peers)
    finally:
        for peer in peers:
            await peer.stop()


async def test_a_changed_reading_reaches_the_peers_without_a_round_of_probes() -> None:
    peers = [Peer(peer_info(name), timing=replace(FAST, period_s=600.0)) for name in ("a", "b", "c")]
    try:
        for peer in peers:
            await peer.start()
            peer.membership.suggest(peers[0].address)
        await until(lambda: len(peers[0].sees) == 2)
        peers[0].reading = replace(peers[0].reading, sequence=2, is_draining=True)
        peers[0].membership.tell_reading()

        def draining(peer: Peer) -> bool:
            reading = peer.membership.reading_of("a")
            return reading is not None and reading.is_draining

        await until(lambda: draining(peers[1]) and draining(peers[2]))
    finally:
        await asyncio.gather(*(peer.stop() for peer in peers))


async def test_a_record_reaches_everybody_and_its_deletion_too() -> None:
    async with mesh("a", "b", "c") as peers:
        peers[1].membership.put_instance("m-1", an_instance("b"))
        await until(lambda: all(peer.membership.view.instances() for peer in peers))
        await until(lambda: len(digests(peers)) == 1)
        peers[1].membership.put_instance("m-1", None)
        await until(lambda: not any(peer.membership.view.instances() for peer in peers))
        await until(lambda: len(digests(peers)) == 1)


async def test_a_peer_that_says_goodbye_is_gone_at_once_with_its_records() -> None:
    async with mesh("a", "b", "c") as (a, b, c):
        b.membership.put_instance("m-1", an_instance("b"))
        await until(lambda: a.membership.view.instances() and c.membership.view.instances())
        await b.stop()
        assert a.sees == ["c"] and c.sees == ["a"]
        assert not a.membership.view.instances() and a.left == ["b"]
        await until(lambda: len(digests([a, c])) == 1)


async def test_a_peer_that_falls_silent_is_dead_everywhere_and_stays_dead() -> None:
    async with mesh("a", "b", "c") as (a, b, c):
        await b.crash()
        await until(lambda: a.sees == ["c"] and c.sees == ["a"])
        rounds = a.membership.peer("c").last_heard  # type: ignore[union-attr]
        await until(lambda: a.membership.peer("c").last_heard > rounds + 0.2)  # type: ignore[union-attr]
        assert [peer.id for peer in a.membership.view.peers()] == ["a", "c"]


async def test_a_suspicion_that_is_refuted_is_no_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "exo_mesh.mesh.membership")
    async with mesh("a", "b") as (a, _b):
        answer, hangs = meshes.answer_probe, asyncio.Event()

        async def answer_late(reply: Any, request: Any) -> Any:
            if request.from_peer == "a":
                await hangs.wait()
            return await answer(reply, request)

        monkeypatch.setattr(meshes, "answer_probe", answer_late)
        monkeypatch.setattr(a.membership._roster.swim, "_timing", replace(FAST, suspicion_s=600.0))
        await until(lambda: any("is suspected" in line for line in caplog.messages))
        hangs.set()
        await until(lambda: a.membership._roster.swim.update_of("b").state is SwimState.ALIVE)  # type: ignore[union-attr]
        levels = {one.levelno for one in caplog.records if "suspected" in one.getMessage()}
        assert levels == {logging.DEBUG} and a.sees == ["b"]


@pytest.mark.parametrize("others", [("a",), ("a", "c", "d")])
async def test_a_killed_peer_whose_port_refuses_is_dead_without_a_suspicion(
    others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meshes, "FAST", replace(meshes.FAST, suspicion_s=60.0))
    async with mesh("b", *others) as (b, *peers):
        await b.crash()
        began = time.monotonic()
        await until(lambda: all("b" not in peer.sees for peer in peers), 5)
        assert time.monotonic() - began < 1.5


async def test_a_port_that_refuses_one_peer_alone_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall that rejects: another peer reaches it."""
    async with mesh("a", "b", "c") as (a, b, c):
        call, is_refused = ControlClient.call, ControlClient.is_refused

        async def cut(client: ControlClient, row: AnyRow, request: Any, timeout_s: float | None = None) -> Any:
            if row is PROBE and request.from_peer == "a" and client.address == b.address:
                raise TransportError("refused")
            return await call(client, row, request, timeout_s)  # type: ignore[arg-type]

        async def refused(client: ControlClient, timeout_s: float) -> bool:
            return client.address == b.address or await is_refused(client, timeout_s)

        monkeypatch.setattr(ControlClient, "call", cut)
        monkeypatch.setattr(ControlClient, "is_refused", refused)
        await until(lambda: a.membership.peer("b").unanswered_since is not None)  # type: ignore[union-attr]
        rounds = c.membership.peer("b").last_heard  # type: ignore[union-attr]
        await until(lambda: c.membership.peer("b").last_heard > rounds + 1.0)  # type: ignore[union-attr]
        assert a.sees == ["b", "c"] and c.sees == ["a", "b"]


async def test_a_peer_that_restarts_rejoins_with_a_higher_incarnation() -> None:
    async with mesh("a", "b") as (a, b):
        b.membership.put_instance("m-1", an_instance("b"))
        await until(a.membership.view.instances)
        await b.crash()
        again = await Peer(peer_info("b", incarnation=2)).start()
        again.membership.suggest(a.address)
        await until(lambda: a.membership.peer("b") and a.membership.peer("b").info.incarnation == 2)  # type: ignore[union-attr]
        await until(lambda: len(digests([a, again])) == 1)
        assert not a.membership.view.instances(), "what the first life placed is gone"
        await again.stop()


async def test_a_peer_that_was_given_up_for_dead_comes_back() -> None:
    async with mesh("a", "b") as (a, _b):
        for state in (SwimState.SUSPECT, SwimState.DEAD):
            a.membership._news.learn(Update("b", state, Life(1)), None)
        assert a.sees == []
        await until(lambda: a.sees == ["b"])


async def test_a_death_told_of_a_living_peer_is_answered_by_it_and_nobody_drops_it() -> None:
    async with mesh("a", "b", "c") as (a, b, c):
        a.membership._news.learn(Update("b", SwimState.DEAD, Life(1)), None)
        alive = Update("b", SwimState.ALIVE, Life(1, 1))
        await until(lambda: all(peer.membership._roster.swim.update_of("b") == alive for peer in (a, c)))
        assert b.num_returns == 1, "it has looked what it must free, once"
        assert a.left == c.left == [] and b.left == []


async def test_a_second_process_with_the_same_id_is_refused_and_both_sides_can_see_why() -> None:
    async with mesh("a", "b") as (a, _b):
        twin = await Peer(peer_info("b", incarnation=2, name="twin")).start()
        twin.membership.suggest(a.address)
        await until(lambda: a.membership.refusals and twin.membership.refusals)
        assert "id b is in use by name-b" in twin.membership.refusals[0]
        assert twin.membership.id_taken_by == "name-b" and a.membership.id_taken_by == ""
        assert twin.sees == [] and a.membership.peer("b").info.name == "name-b"  # type: ignore[union-attr]
        await twin.stop()


async def test_other_namespaces_and_protocols_are_refused_with_the_reason() -> None:
    async with mesh("a", "b") as (a, _b):
        for stranger in (peer_info("x", namespace="office"), peer_info("y", protocol=9)):
            peer = await Peer(stranger).start()
            peer.membership.suggest(a.address)
            await until(lambda peer=peer: peer.membership.refusals)
            assert peer.sees == []
            await peer.stop()
        assert any("name-x" in text and "namespace 5cc3f828 is not" in text for text in a.membership.refusals)
        assert any("protocol 9" in text for text in a.membership.refusals)
        assert a.sees == ["b"]


async def test_a_node_told_its_own_address_does_not_join_itself() -> None:
    async with mesh("a") as (a,):
        # as behind an address translation: it does not know this address for its own
        a.membership.describe(peer_info("a", addresses=("10.9.9.9:5000",)))
        a.membership.suggest(a.address)
        await until(lambda: a.membership._dialer.is_failing(a.address))
        assert a.sees == [] and not a.membership.refusals


async def test_stopping_leaves_no_task_behind() -> None:
    async with mesh("a", "b") as peers:
        pass
    assert all(len(peer.membership._tasks) == 0 for peer in peers)


async def test_forged_hellos_take_the_place_of_a_bounded_number_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a real peer comes in as soon as they are given up."""
    monkeypatch.setattr("exo_mesh.mesh.membership.admission.MAX_UNPROVEN", 5)
    async with mesh("a", "b") as (a, _b):
        replies = []
        for number in range(50):
            forged = peer_info(f"forged-{number}", addresses=("127.0.0.1:9",))
            replies.append(await a.membership.admission.answer_hello(HelloRequest(forged), "127.0.0.1"))
        assert 0 < sum(reply.accepted for reply in replies) <= 5
        assert "have not answered yet" in replies[-1].reason
        late = await Peer(peer_info("c")).start()

        def is_let_in() -> bool:
            late.membership.suggest(a.address)  # as a discovery does, which names a peer over and over
            return sorted(a.sees) == ["b", "c"]

        await until(is_let_in, 60)
        await late.stop()

"""Digests of prefix caches reach every peer when they have changed, and cost nothing while they do not."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from exo_mesh.domain.routing.digest import MAX_BYTES
from exo_mesh.mesh.membership.calls import PROBE_REPLY
from exo_mesh.mesh.membership.messages import PeerPrefixes, ProbeReply
from exo_mesh.mesh.membership.prefixes import MAX_INSTANCES, MAX_PEER_BYTES, READ_S, REPEAT_S, PrefixNews
from exo_mesh.mesh.membership.swim import SMALL
from tests.mesh.membership.meshes import mesh, until

DIGEST, LONGEST = bytes(8 + 6 * 3), bytes(MAX_BYTES)


class Peers:
    """Peers that call each other by hand, in one time."""

    def __init__(self, count: int) -> None:
        self.now, self.bytes = 0.0, 0
        names = [f"p{number}" for number in range(count)]
        self.kept: dict[str, dict[str, bytes]] = {name: {} for name in names}
        self.rosters = {name: self._roster(name, names) for name in names}
        self.news = {name: PrefixNews(self.rosters[name], partial(self.kept.__getitem__, name)) for name in names}

    def _roster(self, name: str, names: list[str]) -> Any:
        peers = {one: SimpleNamespace(id=one, info=SimpleNamespace(incarnation=1)) for one in names if one != name}
        own, is_small = SimpleNamespace(id=name, incarnation=1), len(peers) <= SMALL
        return SimpleNamespace(own=own, peers=peers, is_small=is_small, clock=lambda: self.now)

    def call(self, caller: str, callee: str) -> None:
        """One probe and its answer."""
        for sender, receiver in ((caller, callee), (callee, caller)):
            messages = self.news[sender].take(receiver)
            self.bytes += PROBE_REPLY.write(ProbeReply("", 0, prefixes=tuple(messages))).ByteSize()
            self.news[receiver].hear(messages)
            self.news[sender].reached(receiver, messages)

    def period(self, rng: random.Random) -> None:
        self.now += 1.0
        for name, roster in self.rosters.items():
            for other in list(roster.peers) if roster.is_small else rng.sample(list(roster.peers), 2):
                self.call(name, other)

    def knowing(self, name: str) -> int:
        return sum(news.of(name) == self.kept[name] for news in self.news.values())


@pytest.mark.parametrize("count", [2, 5, 60])
def test_a_change_reaches_every_peer_and_then_nothing_is_sent(count: int) -> None:
    peers, rng = Peers(count), random.Random(1)
    for kept in ({"m-1": DIGEST}, {"m-1": LONGEST, "m-2": DIGEST}, {}):
        peers.kept["p0"] = kept
        for _ in range(12):
            peers.period(rng)
        assert peers.knowing("p0") == count
        peers.bytes = 0
        peers.period(rng)
        assert peers.bytes == 0


def test_a_lost_message_is_sent_again_and_an_answer_that_was_lost_with_the_next_repetition() -> None:
    peers = Peers(2)
    peers.kept["p0"] = {"m-1": DIGEST}
    for _ in range(3):
        assert len(peers.news["p0"].take("p1")) == 1, "the peer has not been reached"
    peers.news["p0"].reached("p1", peers.news["p0"].take("p1"))
    assert not peers.news["p0"].take("p1")
    peers.now += REPEAT_S
    peers.call("p0", "p1")
    assert peers.knowing("p0") == 2


def test_a_peer_that_joins_gets_what_is_published() -> None:
    peers = Peers(3)
    late = peers.rosters["p0"].peers.pop("p2")
    peers.kept["p0"] = {"m-1": DIGEST}
    peers.call("p0", "p1")
    peers.rosters["p0"].peers["p2"] = late
    peers.call("p2", "p0")
    assert peers.knowing("p0") == 3


def test_a_peer_that_is_gone_is_forgotten_and_one_that_has_restarted_counts_anew() -> None:
    peers = Peers(2)
    for kept in ({"m-1": DIGEST}, {"m-1": LONGEST}):
        peers.kept["p0"] = kept
        peers.now += READ_S
        peers.call("p0", "p1")
    gone = peers.rosters["p1"].peers.pop("p0")
    assert peers.news["p1"].of("p0") == {}
    gone.info.incarnation = peers.rosters["p0"].own.incarnation = 2
    peers.rosters["p1"].peers["p0"] = gone
    peers.kept["p0"] = {"m-7": DIGEST}
    peers.news["p0"] = PrefixNews(peers.rosters["p0"], lambda: peers.kept["p0"])
    peers.call("p0", "p1")
    assert peers.news["p1"].of("p0") == {"m-7": DIGEST}


def test_what_a_peer_publishes_is_bounded_whatever_it_drives() -> None:
    for count in (1, 2, 3, 30, 200):
        peers = Peers(2)
        peers.kept["p0"] = {f"m-{number:03}": LONGEST for number in range(count)}
        peers.call("p0", "p1")
        found = peers.news["p1"].of("p0")
        assert sum(map(len, found.values())) <= MAX_PEER_BYTES and len(found) == min(count, MAX_INSTANCES)
        assert peers.bytes < MAX_PEER_BYTES + 40 * count + 40


@pytest.mark.parametrize(
    "odd",
    [
        PeerPrefixes("p0", 7, 1, {"m-1": DIGEST}),
        PeerPrefixes("stranger", 1, 1, {"m-1": DIGEST}),
        PeerPrefixes("p1", 1, 1, {"m-1": DIGEST}),
        PeerPrefixes("p0", 1, 1, {"m-1": DIGEST[:-1]}),
        PeerPrefixes("p0", 1, 1, {"m-1": bytes(MAX_BYTES + 6)}),
        PeerPrefixes("p0", 1, 1, {"m" * 300: DIGEST}),
    ],
)
def test_what_is_out_of_range_is_not_taken(odd: PeerPrefixes) -> None:
    peers = Peers(2)
    peers.news["p1"].hear([odd])
    assert not peers.news["p1"].of("p0") and not peers.news["p1"].of("stranger") and not peers.news["p1"].of("p1")


def test_a_flood_of_instances_is_cut() -> None:
    peers = Peers(2)
    many = {f"m-{number}": DIGEST for number in range(1000)}
    peers.news["p1"].hear([PeerPrefixes("p0", 1, 1, many)])
    assert len(peers.news["p1"].of("p0")) == MAX_INSTANCES


async def test_probes_carry_digests_over_real_connections() -> None:
    async with mesh("a", "b", "c") as peers:
        peers[0].prefixes["m-1"] = DIGEST
        await until(lambda: all(peer.membership.prefixes_of("a") == {"m-1": DIGEST} for peer in peers))
        assert peers[0].membership.prefixes_of("b") == {}

"""Each byte comes from one place first, from the hub once at most, and all peers come to the same plan."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exo_mesh.domain import fetch_plan as module
from exo_mesh.domain.fetch_plan import HUB, PlannedSource, fetch_plan
from exo_mesh.domain.spans import Pieces, Spans, merged, minus

PEERS = ("a", "b", "c", "d")
FILES = ("one", "two")

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=4).map(
    lambda pairs: merged((min(pair), max(pair)) for pair in pairs)
)
PIECES = st.dictionaries(st.sampled_from(FILES), SPANS, max_size=2)
Wants = dict[str, dict[str, Spans]]
BY_PEER = st.dictionaries(st.sampled_from(PEERS), PIECES, max_size=4)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 7)


def bytes_of(pieces: Pieces) -> set[tuple[str, int]]:
    return {(file, at) for file, spans in pieces.items() for start, stop in spans for at in range(start, stop)}


def first_sources(shares: list[module.PlannedShare]) -> Counter[tuple[str, int]]:
    return Counter(one for share in shares for one in bytes_of(share.pieces))


@settings(max_examples=25)
@given(wants=BY_PEER, present=BY_PEER, ways=st.permutations(PEERS))
def test_every_byte_that_is_missing_is_in_exactly_one_share(wants: Wants, present: Wants, ways: list[str]) -> None:
    for peer_id in PEERS:
        shares = fetch_plan(peer_id, wants, present, ways, PEERS)
        missing = bytes_of(wants.get(peer_id, {})) - bytes_of(present.get(peer_id, {}))
        assert first_sources(shares) == Counter(missing)
        assert all(share.sources[-1] == PlannedSource(HUB) for share in shares)


@settings(max_examples=25)
@given(wants=BY_PEER, present=BY_PEER, seed=st.randoms(use_true_random=False))
def test_the_hub_gives_each_byte_to_one_peer_and_only_what_nobody_has(
    wants: Wants, present: Wants, seed: Random
) -> None:
    from_hub: Counter[tuple[str, int]] = Counter()
    for peer_id in PEERS:  # each with links of its own
        shares = fetch_plan(peer_id, wants, present, seed.sample(PEERS, len(PEERS)), PEERS)
        for share in shares:
            if share.sources[0].peer == HUB:
                from_hub.update(bytes_of(share.pieces))
    wanted = {one for pieces in wants.values() for one in bytes_of(pieces)}
    held = {one for pieces in present.values() for one in bytes_of(pieces)}
    assert from_hub == Counter(wanted - held)


@settings(max_examples=25)
@given(wants=BY_PEER, present=BY_PEER, ways=st.permutations(PEERS))
def test_who_waits_for_a_peer_waits_for_one_that_asks_the_hub(wants: Wants, present: Wants, ways: list[str]) -> None:
    plans = {peer_id: fetch_plan(peer_id, wants, present, ways, PEERS) for peer_id in PEERS}
    hub_bytes = {
        peer_id: {one for share in shares if share.sources[0].peer == HUB for one in bytes_of(share.pieces)}
        for peer_id, shares in plans.items()
    }
    for shares in plans.values():
        for share in shares:
            if share.sources[0].is_arriving:
                assert bytes_of(share.pieces) <= hub_bytes[share.sources[0].peer]


@settings(max_examples=25)
@given(wants=BY_PEER, present=BY_PEER, ways=st.permutations(PEERS))
def test_who_has_the_bytes_is_asked_by_the_best_way_first(wants: Wants, present: Wants, ways: list[str]) -> None:
    for share in fetch_plan("a", wants, present, ways, PEERS):
        holders = [one.peer for one in share.sources if one.peer != HUB and not one.is_arriving]
        assert holders == sorted(holders, key=ways.index)
        for peer_id in PEERS:
            has_all = bytes_of(share.pieces) <= bytes_of(present.get(peer_id, {}))
            assert has_all == (peer_id in holders) or peer_id == "a"


def test_several_peers_that_want_everything_fetch_a_part_each() -> None:
    wants = {peer_id: {"one": ((0, 40),)} for peer_id in ("a", "b", "c")}
    (mine,) = [
        share for share in fetch_plan("a", wants, {}, ("b", "c"), PEERS) if share.sources == (PlannedSource(HUB),)
    ]
    assert mine.pieces == {"one": ((0, 7), (21, 28))}


def test_without_a_hub_what_nobody_has_has_no_source() -> None:
    wants = {"a": {"one": ((0, 10),)}}
    shares = fetch_plan("a", wants, {"b": {"one": ((0, 4),)}}, ("b",), ())
    assert {share.sources: share.pieces for share in shares} == {
        (PlannedSource("b"),): {"one": ((0, 4),)},
        (): {"one": ((4, 10),)},
    }
    assert minus(((0, 10),), ((0, 4),)) == ((4, 10),)


def test_a_peer_that_may_not_ask_the_hub_waits_for_one_that_may() -> None:
    wants = {peer_id: {"one": ((0, 5),)} for peer_id in ("a", "b")}
    (share,) = fetch_plan("a", wants, {}, ("b",), ("b",))
    assert share.sources == (PlannedSource("b", is_arriving=True),)

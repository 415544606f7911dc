"""Records merge in any order to the same view; the dead and the deleted do not come back."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.download import DownloadInfo, DownloadState
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.view import (
    MAX_CARDS_PER_OWNER,
    MAX_DOWNLOADS_PER_OWNER,
    MAX_RECORDS_PER_OWNER,
    TOMBSTONE_S,
    CardInfo,
    InstanceInfo,
    InstanceState,
    Record,
    RecordKey,
    View,
)


def peer_record(owner: str, version: int, *, deleted: bool = False) -> Record:
    info = PeerInfo(owner, 1, f"name-{version}", "0", 1, "default", ("127.0.0.1:1",))
    return Record(RecordKey("peer", owner, owner), version, None if deleted else info)


def instance_record(owner: str, counter: int, version: int = 1) -> Record:
    stage = StagePlan(owner, "dummy", Shard("m", 0, 4, 4), 10)
    plan = Plan("m-1", Ballot(counter, owner), "m", "d", (stage,), 64, PlanInputs(((owner, 10),), "memory", 1))
    return Record(RecordKey("instance", "m-1", owner), version, InstanceInfo(plan, InstanceState.READY))


records = st.lists(
    st.builds(peer_record, st.sampled_from("abcd"), st.integers(1, 6), deleted=st.booleans()), max_size=30
)


def writer_order(sent: list[Record]) -> list[Record]:
    """One record per key and version, as a single writer would write them."""
    return list({(record.key, record.version): record for record in sent}.values())


@given(records, st.randoms())
def test_merging_commutes_and_repeats_change_nothing(sent: list[Record], rng: random.Random) -> None:
    written = writer_order(sent)
    shuffled = [*written, *written]
    rng.shuffle(shuffled)
    first, second = View(), View()
    first.merge(written, 0.0)
    for record in shuffled:
        second.merge([record], 0.0)
    assert first.versions() == second.versions()
    assert first.digest() == second.digest()


@given(records, records)
def test_views_that_hold_the_same_have_equal_sums_and_others_do_not(left: list[Record], right: list[Record]) -> None:
    seen = {(record.key, record.version): record for record in [*left, *right]}
    a, b = View(), View()
    a.merge([seen[record.key, record.version] for record in left], 0.0)
    b.merge([seen[record.key, record.version] for record in right], 5.0)
    assert (a.sum == b.sum) == (a.digest() == b.digest())
    for owner in "abcd":
        a.merge(b.of_owner(owner), 0.0)
        b.merge(a.of_owner(owner), 5.0)
        assert a.sum_of(owner) == b.sum_of(owner) and a.newest_of(owner) == b.newest_of(owner)
    assert a.versions() == b.versions() and a.digest() == b.digest() and a.sum == b.sum
    a.drop_owner("a")
    b.drop_owner("a")
    assert a.sum == b.sum and a.sum_of("a") == 0


def test_a_deletion_beats_what_it_deleted_and_is_forgotten_after_a_while() -> None:
    view = View()
    view.merge([peer_record("a", 2, deleted=True)], now=100.0)
    assert view.merge([peer_record("a", 1)], now=101.0) == []
    assert view.peers() == []
    view.expire(100.0 + TOMBSTONE_S + 1)
    assert view.versions() == {}


def test_the_highest_ballot_of_an_instance_is_the_one_seen() -> None:
    view = View()
    view.merge([instance_record("a", 1), instance_record("b", 3), instance_record("c", 2)], 0.0)
    assert [owner for owner, _ in view.instances()] == ["b"]


def test_dropping_an_owner_answers_what_was_in_force() -> None:
    view = View()
    view.merge([peer_record("a", 1), instance_record("a", 1), peer_record("b", 1)], 0.0)
    assert {record.key.kind for record in view.drop_owner("a")} == {"peer", "instance"}
    assert [peer.id for peer in view.peers()] == ["b"]


def test_an_owner_cannot_flood_the_view() -> None:
    view = View()
    stage = instance_record("a", 1).value
    view.merge([Record(RecordKey("instance", f"i{n}", "a"), 1, stage) for n in range(10_000)], 0.0)
    assert len(view.versions()) == MAX_RECORDS_PER_OWNER


def test_digests_ignore_how_a_view_came_to_be_and_see_every_change() -> None:
    one, two = View(), View()
    one.merge([peer_record("a", 1), peer_record("b", 1)], 0.0)
    two.merge([peer_record("b", 1), peer_record("a", 1), peer_record("z", 4, deleted=True)], 9.0)
    assert one.digest() == two.digest()
    two.merge([peer_record("a", 2)], 9.0)
    assert one.digest() != two.digest()


def test_an_adopted_instance_stands_above_its_old_owners_record() -> None:
    held = View()
    old = instance_record("z", 2)
    assert isinstance(old.value, InstanceInfo)
    taken = replace(old.value, adopted=Ballot(3, "a"))
    held.merge([old, Record(RecordKey("instance", "m-1", "a"), 1, taken)], 0.0)
    assert held.instances() == [("a", taken)]
    assert held.records_of_instances() == [("z", old.value), ("a", taken)]


def download_record(owner: str, model: str, done: int, version: int = 1) -> Record:
    info = DownloadInfo(model, DownloadState.ONGOING, done, 100)
    return Record(RecordKey("download", model, owner), version, info)


def test_the_progress_of_a_download_is_told_and_does_not_change_what_is_agreed() -> None:
    view = View()
    view.merge([peer_record("a", 1)], 0.0)
    before, told = view.digest(), view.sum
    for done in (1, 2):
        assert view.merge([download_record("a", "m", done, version=done)], 0.0)
        assert [info.done_bytes for _, info in view.downloads()] == [done]
    assert view.digest() == before and view.sum != told


def test_an_owner_cannot_fill_the_view_with_downloads() -> None:
    view = View()
    view.merge([download_record("a", f"m-{n}", 1) for n in range(3 * MAX_DOWNLOADS_PER_OWNER)], 0.0)
    view.merge([instance_record("a", 1)], 0.0)
    assert len(view.downloads()) == MAX_DOWNLOADS_PER_OWNER and len(view.instances()) == 1


def test_an_owner_has_a_bounded_number_of_cards_and_they_do_not_take_the_place_of_other_records() -> None:
    view = View()
    view.merge((Record(RecordKey("card", f"m{n}", "a"), n, CardInfo("x")) for n in range(1, 200)), 0.0)
    assert len(view.cards()) == MAX_CARDS_PER_OWNER == view.cards_version
    assert view.merge([instance_record("a", 1, 500)], 0.0)
    assert view.cards()[0] == ("m1", "a", CardInfo("x"))
    view.drop_owner("a")
    assert view.cards() == [] and view.cards_version == 2 * MAX_CARDS_PER_OWNER

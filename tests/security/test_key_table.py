"""Tables of API keys merge in any order to the same one, and a revoked key stays revoked."""

from __future__ import annotations

import datetime
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.security import key_table
from exo_mesh.security.api_keys import new_key, revoke
from exo_mesh.security.key_table import ApiKey, Role, live, merge, missing, table_digest
from exo_mesh.wire.key_codec import keys_from_proto, keys_to_proto

NOW = datetime.datetime(2030, 5, 1, 12, 30, tzinfo=datetime.UTC)

IDS = st.sampled_from(["00000000", "0a1b2c3d", "ffffffff"])
KEYS = st.builds(
    lambda key_id, role, digit, year: ApiKey(key_id, role, digit * 32, digit * 64, f"{year}-01-01"),
    IDS, st.sampled_from(list(Role)), st.sampled_from("12"), st.sampled_from([1970, 2030]),
)  # fmt: skip
REVOKED = st.builds(lambda key_id, year: revoke(key_id, NOW.replace(year=year)), IDS, st.sampled_from([1970, 2030]))
TABLES = st.lists(KEYS | REVOKED, max_size=6)


@given(TABLES, TABLES, TABLES)
def test_merging_commutes_associates_and_repeats_change_nothing(
    a: list[ApiKey], b: list[ApiKey], c: list[ApiKey]
) -> None:
    whole = merge(a, b, c)
    for x, y, z in permutations([a, b, c]):
        assert merge(merge(x, y).values(), z) == merge(x, merge(y, z).values()) == whole
    assert merge(whole.values(), whole.values(), a) == whole
    assert table_digest(whole) == table_digest(merge(c, b, a)) != 0


@given(TABLES, TABLES)
def test_no_merge_brings_a_revoked_key_back(a: list[ApiKey], b: list[ApiKey]) -> None:
    revoked = {key.id for key in a if key.revoked}
    assert not revoked & live(merge(b, a, b)).keys()


@given(TABLES, TABLES)
def test_two_who_tell_each_other_what_the_other_lacks_hold_the_same(a: list[ApiKey], b: list[ApiKey]) -> None:
    ours, theirs = merge(a), merge(b)
    ours_now = merge(ours.values(), theirs.values())
    theirs_now = merge(theirs.values(), missing(ours_now, theirs))
    assert ours_now == theirs_now and table_digest(ours_now) == table_digest(theirs_now)


@given(TABLES)
def test_entries_arrive_as_they_were_sent(keys: list[ApiKey]) -> None:
    assert keys_from_proto(keys_to_proto(keys)) == keys


def test_a_table_is_bounded_and_forgets_the_oldest_revocations_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "MAX_KEYS", 20)
    monkeypatch.setattr(key_table, "MAX_REVOKED", 20)
    keys = [new_key(Role.USE, NOW)[1] for _ in range(50)]
    revoked = [revoke(f"{number:08x}", NOW + datetime.timedelta(days=number)) for number in range(50)]
    table = merge(keys, revoked)
    assert table == merge(revoked, reversed(keys)), "whatever the order"
    assert len(live(table)) == 20 and len(table) == 40
    assert {key.id for key in table.values() if key.revoked} == {f"{number:08x}" for number in range(30, 50)}


def test_a_full_table_fits_into_a_message_of_a_quarter_of_a_mebibyte() -> None:
    keys = [new_key(Role.ADMIN, NOW)[1] for _ in range(key_table.MAX_KEYS)]
    keys += [revoke(f"{number:08x}", NOW) for number in range(key_table.MAX_REVOKED)]
    assert sum(message.ByteSize() + 4 for message in keys_to_proto(keys)) < 2**18


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "0A1B2C3D"},
        {"id": '0"]\nx = "'},
        {"role": "king"},
        {"salt": "zz" * 16},
        {"salt": ""},
        {"digest": "00"},
        {"created": "2030-05-01\n"},
        {"created": '"'},
        {"name": "a\nb"},
        {"name": "x" * 41},
        {"name": " "},
        {"revoked": "yes"},
        {"revoked": "2030-05-01T12:30:00Z"},
        {"salt": "", "digest": "", "created": "", "revoked": '2030-05-01T12:30:00Z"\n'},
    ],
    ids=str,
)
def test_what_is_no_entry_is_not_taken_from_a_peer(wrong: dict[str, str]) -> None:
    """It would be written into the file of keys."""
    (good,) = keys_to_proto([new_key(Role.USE, NOW)[1]])
    bad = type(good)()
    bad.CopyFrom(good)
    for name, text in wrong.items():
        setattr(bad, name, text)
    assert keys_from_proto([bad, good]) == keys_from_proto([good]) != []


def test_names_travel_and_tables_with_and_without_them_are_equal() -> None:
    """A peer of an older version keeps no names, and would exchange keys for ever if they counted."""
    (key,) = named = [new_key(Role.USE, NOW, 'Ana\'s "laptop" \\ 笔记本')[1]]
    assert [one.name for one in keys_from_proto(keys_to_proto(named))] == [key.name]
    nameless = {key.id: replace(key, name="")}
    assert table_digest(nameless) == table_digest({key.id: key}) and not missing(nameless, {key.id: key})
    assert [one.name for one in merge(nameless.values(), named).values()] == [key.name]
    assert [one.name for one in merge(named, nameless.values()).values()] == [key.name]


def test_a_revoked_key_fits_nothing() -> None:
    gone = revoke("0a1b2c3d", NOW)
    assert gone.is_well_formed and not gone.fits("") and not gone.fits("x")

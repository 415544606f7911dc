"""Tables of shared settings merge in any order to the same one, and the newest change is in force."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.domain.shared_settings import MAX_SETTINGS, MAX_TEXT_BYTES, SharedSetting, SharedSettings
from exo_mesh.domain.view import Record, RecordKey, View
from exo_mesh.errors import TransportError
from exo_mesh.wire.control_codec import record_from_proto, record_to_proto, settings_from_proto
from exo_mesh.wire.proto import control_pb2 as pb

ENTRIES = st.builds(
    SharedSetting, st.sampled_from("abc"), st.none() | st.sampled_from(["1", "2"]), st.integers(1, 3),
    st.sampled_from(["p", "q"]),
)  # fmt: skip
TABLES = st.lists(ENTRIES, max_size=6).map(SharedSettings.of)


@given(TABLES, TABLES, TABLES)
def test_merging_commutes_associates_and_repeats_change_nothing(
    a: SharedSettings, b: SharedSettings, c: SharedSettings
) -> None:
    whole = a.merged(b, c)
    for x, y, z in permutations([a, b, c]):
        assert x.merged(y).merged(z) == x.merged(y.merged(z)) == whole
    assert whole.merged(whole, a) == whole


@given(TABLES, TABLES)
def test_a_change_beats_everything_that_its_author_had_seen(before: SharedSettings, seen: SharedSettings) -> None:
    known = before.merged(seen)
    changed = known.changed({"a": "9", "b": None}, "p")
    assert changed.merged(before, seen).texts == {**{k: v for k, v in known.texts.items() if k == "c"}, "a": "9"}


@given(TABLES)
def test_a_table_arrives_as_it_was_sent(table: SharedSettings) -> None:
    record = Record(RecordKey("settings", "mesh", "p"), 7, table)
    assert record_from_proto(record_to_proto(record)).value == table


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "x" * 65, "counter": 1},
        {"name": "x", "counter": 0},
        {"name": "x", "counter": 2**53 + 1},
        {"name": "x", "counter": 1, "text": b"x" * (MAX_TEXT_BYTES + 1)},
        {"name": "x", "counter": 1, "text": b"\xff"},
        {"name": "x", "counter": 1, "author": "p" * 65},
    ],
)
def test_what_no_peer_would_send_is_refused(entry: dict[str, object]) -> None:
    with pytest.raises(TransportError):
        settings_from_proto(pb.SharedSettings(settings=[pb.SharedSetting(**entry)]))


def test_a_table_is_bounded() -> None:
    entries = [pb.SharedSetting(name=f"s{index}", counter=1) for index in range(MAX_SETTINGS + 1)]
    with pytest.raises(TransportError):
        settings_from_proto(pb.SharedSettings(settings=entries))
    view, table = View(), SharedSettings.of([SharedSetting("a", "1", 1, "p")])
    view.merge([Record(RecordKey("settings", f"r{index}", "p"), index + 1, table) for index in range(10)], 0.0)
    assert len(view.shared_settings()) == 1, "one record of settings for each owner"

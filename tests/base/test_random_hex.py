"""Random ids: as long as wanted, and never the same bytes twice."""

from __future__ import annotations

from exo_mesh.base.random_hex import RandomHex


def test_ids_have_the_wanted_length_and_none_comes_twice() -> None:
    random_hex = RandomHex()
    ids = [random_hex(12) for _ in range(2000)]
    assert {len(one) for one in ids} == {24} and len(set(ids)) == 2000

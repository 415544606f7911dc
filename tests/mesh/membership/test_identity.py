"""A node keeps its id over restarts; two nodes on one home never share one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from exo_mesh.errors import InputError
from exo_mesh.mesh.membership.identity import MAX_NODES_PER_HOME, take_identity


def test_the_id_survives_a_restart_and_the_incarnation_rises(tmp_path: Path) -> None:
    first = take_identity(tmp_path)
    first.release()
    second = take_identity(tmp_path)
    assert (second.id, second.incarnation) == (first.id, first.incarnation + 1)
    second.release()


def test_a_second_node_on_the_same_home_takes_another_id_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = take_identity(tmp_path)
    with caplog.at_level(logging.WARNING):
        second = take_identity(tmp_path)
    assert second.id != first.id and "another node already uses the home" in caplog.text
    second.release()
    third = take_identity(tmp_path)
    assert third.id == second.id
    third.release()
    first.release()


def test_a_damaged_file_gives_a_new_id(tmp_path: Path) -> None:
    (tmp_path / "node_id").write_text("not an id\n")
    identity = take_identity(tmp_path)
    assert len(identity.id) == 32 and identity.incarnation == 1
    identity.release()


def test_homes_are_not_shared_without_end(tmp_path: Path) -> None:
    held = [take_identity(tmp_path) for _ in range(MAX_NODES_PER_HOME)]
    with pytest.raises(InputError, match="--home"):
        take_identity(tmp_path)
    assert len({identity.id for identity in held}) == MAX_NODES_PER_HOME
    for identity in held:
        identity.release()

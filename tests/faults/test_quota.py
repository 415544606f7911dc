"""Slow machines of fault runs: what is written into control groups. The folders of the system are stood in for, because
only root may write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.faults import quota


def test_a_node_is_put_into_a_group_with_its_part_of_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "CGROUPS", tmp_path)
    quota.CpuQuota(0.3).hold(123, "n0")
    (group,) = tmp_path.glob("exo-mesh-n0-*")
    assert (group / "cpu.max").read_text() == "30000 100000" and (group / "cgroup.procs").read_text() == "123"


def test_control_groups_of_the_first_version_have_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").touch()
    monkeypatch.setattr(quota, "CGROUPS", tmp_path)
    quota.CpuQuota(0.3).hold(123, "n1")
    (group,) = (tmp_path / "cpu").glob("exo-mesh-n1-*")
    assert [(group / f"cpu.cfs_{name}_us").read_text() for name in ("period", "quota")] == ["100000", "30000"]


def test_a_system_that_refuses_is_found_before_a_node_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "CGROUPS", tmp_path / "nowhere")
    with pytest.raises(OSError, match="nowhere"):
        quota.CpuQuota(0.3)
    quota.CpuQuota(0).hold(123, "n0")
    assert not list(tmp_path.iterdir()), "without a quota nothing is written"

"""`exo-mesh cache` lists, removes and pins the files of the prefix cache on this machine."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from exo_mesh.cli.main import main
from exo_mesh.rings.prefix_disk.folder import stored_files


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files of two models, one second apart."""
    monkeypatch.setenv("EXO_MESH_HOME", str(tmp_path / "home"))
    root = tmp_path / "kv"
    for number, model in enumerate(("big-model-1a", "big-model-1a", "small-2b")):
        folder = root / model / "numpy-layers-0-4-abcd" / "rank-0"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number}{'ab' * 15}f-{300 + number}.kv"
        path.write_bytes(b"x" * 2_000_000)
    return root


def cache(root: Path, *arguments: str) -> int:
    return main(["cache", *arguments, "--prefix-disk", str(root)])


def test_the_list_shows_tokens_size_and_stage_of_each_file(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache(root, "ls") == 0
    shown = capsys.readouterr().out
    assert "0abababababa" in shown and "302" in shown and "2.0" in shown
    assert "small-2b/numpy-layers-0-4-abcd/rank-0" in shown and "3 files, 6.0 MB" in shown
    assert cache(root, "ls", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {one["tokens"] for one in listed} == {300, 301, 302} and not any(one["pinned"] for one in listed)
    assert all(abs(one["last_used"] - time.time()) < 3600 for one in listed)


def test_files_are_removed_by_key_by_model_or_all(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache(root, "rm", "0aba") == 0 and "removed 1 of 3" in capsys.readouterr().out
    assert cache(root, "rm", "small") == 0
    assert [one.tokens for one in stored_files(root)] == [301]
    assert cache(root, "rm", "--all", "--json") == 0
    assert not list(stored_files(root))
    assert cache(root, "ls") == 0 and "no prompts are on disk" in capsys.readouterr().out


def test_a_file_is_pinned_and_unpinned(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache(root, "pin", "1ABAB") == 0
    assert [one.tokens for one in stored_files(root) if one.pinned] == [301]
    assert cache(root, "ls") == 0 and "pinned" in capsys.readouterr().out.replace("PINNED", "")
    assert cache(root, "unpin", "1abab") == 0
    assert not any(one.pinned for one in stored_files(root))


@pytest.mark.parametrize(
    "arguments", [["rm"], ["pin"], ["ls", "x"], ["ls", "--all"], ["pin", "--all"], ["rm", "x", "--all"]]
)
def test_arguments_that_do_not_fit_the_action_are_refused(root: Path, arguments: list[str]) -> None:
    assert cache(root, *arguments) == 2
    assert len(list(stored_files(root))) == 3


def test_an_unknown_key_and_a_missing_directory_have_one_message(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache(root, "rm", "ffff") != 0
    assert "exo-mesh cache ls" in capsys.readouterr().err
    assert main(["cache", "ls"]) != 0
    assert "--prefix-disk DIR" in capsys.readouterr().err

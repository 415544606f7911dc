"""What a node writes is for its user only, also where an older version was more open."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import ChildNode
from exo_mesh.settings.home import make_private
from tests.support.processes import QUIET_FLAGS, clean_environ


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_home(tmp_path: Path) -> Path:
    """As an older version left it, with models that the user shares."""
    home = tmp_path / "home"
    for folder in ("logs", "models"):
        (home / folder).mkdir(parents=True)
        (home / folder / "file").write_text("x")
    (home / "node_id").write_text("x")
    for folder, directories, files in os.walk(home):
        for name in (*directories, *files):
            Path(folder, name).chmod(0o755)
    home.chmod(0o755)
    return home


def test_an_older_home_is_repaired_and_the_models_stay_as_they_are(open_home: Path) -> None:
    make_private(open_home)
    assert (mode(open_home), mode(open_home / "logs"), mode(open_home / "logs" / "file")) == (0o700, 0o700, 0o700)
    assert mode(open_home / "node_id") == 0o700, "what its owner may do is not changed"
    assert mode(open_home / "models") == mode(open_home / "models" / "file") == 0o755


def test_a_directory_that_is_more_than_a_home_keeps_its_mode(open_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(open_home))
    make_private(open_home)
    assert mode(open_home) == 0o755 and mode(open_home / "logs") == 0o700
    monkeypatch.delenv("HOME")
    open_home.chmod(0o1777)
    make_private(open_home)
    assert mode(open_home) == 0o777 | stat.S_ISVTX


def test_a_symlink_in_the_home_is_not_followed(open_home: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    outside.chmod(0o755)
    (open_home / "runners").symlink_to(outside)
    make_private(open_home)
    assert mode(outside) == 0o755


@pytest.mark.extended
def test_all_that_a_real_node_makes_is_private(tmp_path: Path) -> None:
    home = tmp_path / "home"
    node = ChildNode([*QUIET_FLAGS, "--api-port", "0"], tmp_path / "log", clean_environ(home))
    try:
        api = ApiClient(node.wait_ready(60)["api_url"])
        question = {"model": "exo-mesh-demo", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi."}]}
        api.post("/v1/chat/completions", question, 60)
        made = [home, *home.rglob("*")]
        assert len(made) > 2 and {mode(path) for path in made} <= {0o700, 0o600}
    finally:
        node.stop()

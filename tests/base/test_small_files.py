"""A link to nothing, a silent pipe or a folder does not count as a missing file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exo_mesh_openai.options import _key

from exo_mesh.api.webtools.options import _key_in
from exo_mesh.base import small_files
from exo_mesh.base.printable import reason_of
from exo_mesh.base.small_files import exists, read_small
from exo_mesh.errors import MeshError
from exo_mesh.mesh.discovery.peers_file import read_peers
from exo_mesh.mesh.discovery.static_group import read_hostfile
from exo_mesh.mesh.discovery.tailscale import read_key
from exo_mesh.security.api_keys import KeyFile
from exo_mesh.security.secret import new_secret, read_secret_file
from exo_mesh.settings.home import make_private
from exo_mesh.settings.loading import load_settings


def test_at_most_one_byte_more_than_asked_for_is_read(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"123456")
    assert [read_small(file, size) for size in (9, 6, 5, 2)] == [b"123456", b"123456", b"123456", b"123"]
    assert read_small(Path("/dev/zero"), 3) == bytes(4)


def test_a_link_to_nothing_exists_and_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    assert exists(tmp_path / "link") and not exists(tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="a link to a file that does not exist"):
        read_small(tmp_path / "link", 10)
    with pytest.raises(FileNotFoundError, match="No such file"):
        read_small(tmp_path / "other", 10)


def test_a_pipe_is_read_to_its_end_as_of_a_command_in_a_shell(tmp_path: Path) -> None:
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(b"secret\n")

    threading.Timer(0.05, write).start()
    try:
        assert read_small(Path(f"/dev/fd/{reading}"), 100) == b"secret\n"
    finally:
        os.close(reading)


READERS: dict[str, Callable[[Path], object]] = {
    "config.toml": lambda path: load_settings({"home": [str(path.parent)]}, {}),
    "mesh.secret": lambda path: load_settings({"home": [str(path.parent)]}, {}),
    "secret": lambda path: load_settings({"home": [str(path.parent)], "secret_file": [str(path)]}, {}),
    "api_keys.toml": lambda path: KeyFile(path).read_all(),
    "peers": lambda path: read_peers(path, 5000),
    "hosts.json": read_hostfile,
    "tailscale": read_key,
    "search": _key_in,
}


def _make_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("make", [_make_link, os.mkfifo, os.mkdir], ids=["link to nothing", "silent pipe", "folder"])
def test_a_file_that_cannot_be_read_is_refused_with_its_name_and_does_not_count_as_missing(
    name: str, make: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_files, "PIPE_WAIT_S", 0.01)
    make(tmp_path / name)
    with pytest.raises(MeshError) as refused:
        READERS[name](tmp_path / name)
    assert str(tmp_path / name) in str(refused.value) and "cannot be read" in str(refused.value)


def test_a_home_that_cannot_be_searched_for_a_secret_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    with pytest.raises(
        MeshError, match=r"mesh\.secret: cannot be read: Not a directory; run the command as the user of"
    ):
        load_settings({}, {})


def test_keys_behind_a_link_to_nothing_leave_no_api_open(tmp_path: Path) -> None:
    (tmp_path / "api_keys.toml").symlink_to("nowhere")
    keys = KeyFile(tmp_path / "api_keys.toml")
    assert keys.configured and keys.check("xm-00000000-x") is None
    assert not KeyFile(tmp_path / "other.toml").configured


def test_a_secret_and_the_key_of_a_server_still_come_from_files_and_pipes(tmp_path: Path) -> None:
    secret = new_secret()
    (tmp_path / "mesh.secret").write_text(secret)
    assert load_settings({"home": [str(tmp_path)]}, {}).settings.secret == secret
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=(tmp_path / "pipe").write_text, args=(secret,)).start()
    assert read_secret_file(tmp_path / "pipe") == secret
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(MeshError, match="must be a file"):
        _key(str(tmp_path / "key"))


def test_an_error_of_the_system_is_shown_with_its_path_and_without_its_number(tmp_path: Path) -> None:
    with pytest.raises(OSError) as missing:
        read_small(tmp_path / "f", 1)
    assert reason_of(missing.value) == f"{tmp_path / 'f'}: No such file or directory"
    assert reason_of(OSError(28, "No space left on device")) == "No space left on device"
    assert reason_of(OSError("closed")) == "closed" and reason_of(ValueError("bad")) == "bad"
    assert reason_of(TimeoutError()) == "TimeoutError"
    home = tmp_path / "file"
    home.write_text("")
    with pytest.raises(MeshError, match=rf"cannot be used: {home}: File exists$"):
        make_private(home)

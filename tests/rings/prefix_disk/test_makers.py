"""A machine finds out which stages of today could use its files with KV, without an engine."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from exo_mesh.domain.shard import KeptLayers
from exo_mesh.rings.prefix_disk.file_format import StoredPrefix, StoredPrefixError
from exo_mesh.rings.prefix_disk.folder import DAY_S, FileLimits, StageFolder
from exo_mesh.rings.prefix_disk.makers import KeptKv, KvMaker, maker_from
from tests.rings.prefix_disk.test_prefix_files import tensors

SECRET = bytes(range(32))
VERSION = ("1.0", "numpy", "2.0")
MAKER = KvMaker("org/m", "digest", "", 0, 4, 8, VERSION, {"threads": "1"})


def write(root: Path, name: str, maker: KvMaker, *lengths: int, secret: bytes | None = None) -> None:
    folder = StageFolder(root, name, maker.text, FileLimits(10**9, 7), secret)
    assert folder.open()
    for length in lengths:
        key = 2 * length.to_bytes(8, "big")
        folder.write(
            StoredPrefix(maker.text, key, length, length, b"h" * 16), tensors(tokens=length), lambda size: None
        )
    folder.close()


def read(root: Path, secret: bytes | None = None, version: tuple[str, str, str] = VERSION) -> object:
    return KeptKv(root, secret, lambda maker: maker.version == version, 7).read()


def test_a_maker_is_read_as_it_was_written_also_by_an_older_version() -> None:
    rank = KvMaker("m", "d", "float32", 0, 4, 8, VERSION, {"b": "2", "a": "1"}, 1, 2)
    assert [maker_from(one.text) for one in (MAKER, rank)] == [MAKER, rank]
    assert MAKER.text == '["org/m", "digest", "", [0, 4, 8], ["1.0", "numpy", "2.0"], [["threads", "1"]]]'


@pytest.mark.parametrize(
    "text", ["", "me", "[]", "[1, 2, 3, 4, 5, 6]", '["m", "d", "", [0], ["1", "e", "2"], []]', "{}"]
)
def test_another_text_names_no_maker(text: str) -> None:
    with pytest.raises(StoredPrefixError):
        maker_from(text)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_the_kv_of_each_stage_is_counted(tmp_path: Path, secret: bytes | None) -> None:
    rank = KvMaker("org/m", "other", "", 4, 8, 8, VERSION, {}, 1, 2)
    write(tmp_path, "m/first/rank-0", MAKER, 600, 300, secret=secret)
    write(tmp_path, "m/last/rank-1", rank, 70, secret=secret)
    assert read(tmp_path, secret) == {
        "digest": [KeptLayers("numpy", 0, 4, 512, keys=(300, 600))],
        "other": [KeptLayers("numpy", 4, 8, 64, "", 1, 2, (70,))],
    }


def test_the_keys_of_the_files_that_were_used_last_are_said(tmp_path: Path) -> None:
    lengths = (10, 20, 30, 40, 50, 60)
    write(tmp_path, "m/first/rank-0", MAKER, *lengths)
    used = time.time()
    for age_s, length in enumerate((60, 20, 50, 10, 40, 30)):
        (file,) = tmp_path.rglob(f"*-{length}.kv")
        os.utime(file, (used - age_s, used - age_s))
    assert read(tmp_path) == {"digest": [KeptLayers("numpy", 0, 4, 128, keys=(10, 20, 50, 60))]}


def test_files_that_no_stage_could_use_do_not_count(tmp_path: Path) -> None:
    assert read(tmp_path / "missing") == {}
    write(tmp_path, "m/first/rank-0", MAKER, 600)
    assert read(tmp_path, version=("1.1", "numpy", "2.0")) == {}
    assert read(tmp_path, SECRET) == {}, "a file that is not sealed, in a closed mesh"
    (file,) = tmp_path.rglob("*.kv")
    file.write_bytes(b"\0" * 100)
    assert read(tmp_path) == {}


def test_files_that_have_expired_do_not_count_unless_they_are_pinned(tmp_path: Path) -> None:
    write(tmp_path, "m/first/rank-0", MAKER, 600, 70)
    old, other = sorted(tmp_path.rglob("*.kv"), key=lambda file: "600" not in file.name)
    os.utime(old, (1, 1))
    assert read(tmp_path) == {"digest": [KeptLayers("numpy", 0, 4, 64, keys=(70,))]}
    os.utime(other, (1, 1))
    assert read(tmp_path) == {}
    old.with_name(f"{old.name.split('-')[0]}.pin").touch()
    assert read(tmp_path) == {"digest": [KeptLayers("numpy", 0, 4, 512, keys=(600,))]}


def test_a_file_that_expires_does_not_count_from_then_on(tmp_path: Path) -> None:
    write(tmp_path, "m/first/rank-0", MAKER, 600, 70)
    (file,) = tmp_path.rglob("*-600.kv")
    os.utime(file, (1000, 1000))
    now = 1000.0
    kept = KeptKv(tmp_path, None, lambda maker: True, 7, now=lambda: now)
    assert kept.read() == {"digest": [KeptLayers("numpy", 0, 4, 512, keys=(70, 600))]}
    now += 7 * DAY_S
    assert kept.read() == {"digest": [KeptLayers("numpy", 0, 4, 64, keys=(70,))]}


def test_a_folder_is_opened_once(tmp_path: Path) -> None:
    write(tmp_path, "m/first/rank-0", MAKER, 600)
    kept = KeptKv(tmp_path, None, lambda maker: True, 7)
    assert kept.read() == {"digest": [KeptLayers("numpy", 0, 4, 512, keys=(600,))]}
    write(tmp_path, "m/first/rank-0", MAKER, 700)
    for file in tmp_path.rglob("*.kv"):
        file.write_bytes(b"it is not read")
    assert kept.read() == {"digest": [KeptLayers("numpy", 0, 4, 1024, keys=(600, 700))]}


def test_a_folder_counts_as_soon_as_one_of_its_files_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, "m/first/rank-0", MAKER, 600)
    (file,) = tmp_path.rglob("*.kv")
    file.write_bytes(b"damaged")
    kept = KeptKv(tmp_path, None, lambda maker: True, 7)
    assert kept.read() == {}
    write(tmp_path, "m/first/rank-0", MAKER, 700)  # removes the damaged file
    assert kept.read() == {"digest": [KeptLayers("numpy", 0, 4, 512, keys=(700,))]}


def test_a_folder_that_could_not_be_read_is_read_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "disk", "m/first/rank-0", MAKER, 600)
    (file,) = tmp_path.rglob("*.kv")
    content = file.read_bytes()
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")  # its path is short; nobody can open it
        file.unlink()
        file.symlink_to(tmp_path / "socket")
        kept = KeptKv(tmp_path / "disk", None, lambda maker: True, 7)
        assert kept.read() == {}
    (tmp_path / "socket").unlink()
    (tmp_path / "socket").write_bytes(content)
    assert kept.read() == {"digest": [KeptLayers("numpy", 0, 4, 512, keys=(600,))]}, "no folder has changed"


def test_files_count_once_their_engine_can_be_used(tmp_path: Path) -> None:
    write(tmp_path, "m/first/rank-0", MAKER, 600)
    is_installed = False
    kept = KeptKv(tmp_path, None, lambda maker: is_installed, 7)
    assert kept.read() == {}
    is_installed = True
    write(tmp_path, "m/first/rank-0", MAKER, 700)
    assert kept.read() == {"digest": [KeptLayers("numpy", 0, 4, 1024, keys=(600, 700))]}

"""A machine finds out which stages of today could use its files with KV, without an engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exo_mesh.domain.shard import KeptLayers
from exo_mesh.prefix_disk.file_format import StoredPrefix, StoredPrefixError
from exo_mesh.prefix_disk.folder import FileLimits, StageFolder
from exo_mesh.prefix_disk.makers import KeptKv, KvMaker, maker_from
from tests.prefix_disk.test_prefix_files import tensors

SECRET = bytes(range(32))
VERSION = ("1.0", "numpy", "2.0")
MAKER = KvMaker("org/m", "digest", "", 0, 4, 8, VERSION, {"threads": "1"})


def write(root: Path, name: str, maker: KvMaker, *lengths: int, secret: bytes | None = None) -> None:
    folder = StageFolder(root, name, maker.text, FileLimits(10**9, 7), secret)
    assert folder.open()
    for length in lengths:
        key = length.to_bytes(16, "big")
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
        "digest": [KeptLayers("numpy", 0, 4, 512)],
        "other": [KeptLayers("numpy", 4, 8, 64, "", 1, 2)],
    }


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
    assert read(tmp_path) == {"digest": [KeptLayers("numpy", 0, 4, 64)]}
    os.utime(other, (1, 1))
    assert read(tmp_path) == {}
    old.with_name(f"{old.name.split('-')[0]}.pin").touch()
    assert read(tmp_path) == {"digest": [KeptLayers("numpy", 0, 4, 512)]}


def test_a_folder_is_opened_once(tmp_path: Path) -> None:
    write(tmp_path, "m/first/rank-0", MAKER, 600)
    asked: list[KvMaker] = []
    kept = KeptKv(tmp_path, None, lambda maker: not asked.append(maker), 7)  # type: ignore[func-returns-value]
    before = kept.read()
    write(tmp_path, "m/first/rank-0", MAKER, 700)
    after = kept.read()
    assert asked == [MAKER] and before == {"digest": [KeptLayers("numpy", 0, 4, 512)]}
    assert after == {"digest": [KeptLayers("numpy", 0, 4, 1024)]}

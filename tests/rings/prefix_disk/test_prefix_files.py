"""A file with KV is read as it was written, and anything else is a miss that is removed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_mesh.domain.tensor import ITEM_BYTES, Tensor
from exo_mesh.rings.prefix_disk import file_format
from exo_mesh.rings.prefix_disk.file_format import StoredPrefix, StoredPrefixError
from exo_mesh.rings.prefix_disk.folder import DAY_S, FileLimits, StageFolder, stored_files

KEY = bytes(range(16))
SECRET = bytes(range(32))
GIB = 2**30


def tensors(seed: int = 1, tokens: int = 70) -> dict[str, Tensor]:
    drawn = np.random.default_rng(seed).standard_normal((2, tokens, 8), dtype=np.float32)
    return {"keys": Tensor.from_numpy(drawn), "lengths": Tensor.from_numpy(np.array([tokens], np.int64))}


def about(key: bytes = KEY, maker: str = "me") -> StoredPrefix:
    return StoredPrefix(maker, key, 70, 71, b"h" * 16, 66, b"p" * 16)


def as_file(secret: bytes | None = None, said: StoredPrefix | None = None) -> bytes:
    stream = io.BytesIO()
    for _ in file_format.write(stream, said or about(), tensors(), secret):
        pass
    return stream.getvalue()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    def plain(them: dict[str, Tensor]) -> dict[str, tuple[object, ...]]:
        return {name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in them.items()}

    return plain(one) == plain(other)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_file_is_read_as_it_was_written(secret: bytes | None) -> None:
    data = as_file(secret)
    said, found = file_format.read(io.BytesIO(data), secret)
    assert said == about() == file_format.read_about(io.BytesIO(data), secret)
    assert same(found, tensors())


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_every_dtype_that_may_cross_a_hop_can_be_stored(dtype: str) -> None:
    stream, wanted = (
        io.BytesIO(),
        {"t": Tensor(dtype, (3, 0), b""), "u": Tensor(dtype, (2,), b"\1" * 2 * ITEM_BYTES[dtype])},
    )
    list(file_format.write(stream, about(), wanted, None))
    assert same(file_format.read(stream, None)[1] if not stream.seek(0) else {}, wanted)


def test_a_file_of_a_version_that_did_not_know_where_prompts_end_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    described = file_format._described

    def before(*parts: Any) -> dict[str, Any]:
        said = described(*parts)
        said["__metadata__"] = {name: text for name, text in said["__metadata__"].items() if "prompt" not in name}
        return said

    monkeypatch.setattr(file_format, "_described", before)
    said, found = file_format.read(io.BytesIO(as_file()), None)
    assert (said.prompt, said.prompt_key) == (0, b"") and same(found, tensors())


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_file_of_many_pieces_is_read_as_it_was_written(monkeypatch: pytest.MonkeyPatch, secret: bytes | None) -> None:
    monkeypatch.setattr(file_format, "PIECE_BYTES", 1000)
    monkeypatch.setattr(file_format, "READ_BYTES", 700)
    stream, size = io.BytesIO(), sum(tensor.num_bytes for tensor in tensors().values())
    steps = list(file_format.write(stream, about(), tensors(), secret))
    assert max(steps) == 1000 and sum(steps) > 2 * size, "checked and written in pieces"
    stream.seek(0)
    assert same(file_format.read(stream, secret)[1], tensors())


def test_a_plain_file_is_what_other_programs_read_as_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    (tmp_path / "a.kv").write_bytes(as_file())
    assert np.array_equal(safetensors.load_file(tmp_path / "a.kv")["keys"], tensors()["keys"].numpy())


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_file_that_is_cut_short_anywhere_is_refused(secret: bytes | None) -> None:
    data = as_file(secret)
    for size in {*range(0, 400, 7), *range(400, len(data), 501), len(data) - 1}:
        with pytest.raises(StoredPrefixError):
            file_format.read(io.BytesIO(data[:size]), secret)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_no_changed_byte_changes_a_tensor(secret: bytes | None) -> None:
    data = as_file(secret)
    for at in {*range(0, 700, 3), *range(700, len(data), 97), len(data) - 1}:
        changed = bytearray(data)
        changed[at] ^= 0x41
        try:
            said, found = file_format.read(io.BytesIO(bytes(changed)), secret)
        except StoredPrefixError:
            continue
        assert secret is None, "a sealed file has no byte without meaning"
        assert said == about() and same(found, tensors()), at


def test_a_sealed_file_shows_nothing_and_opens_only_with_its_key() -> None:
    sealed = as_file(SECRET)
    assert (
        b"keys" not in sealed and KEY.hex().encode() not in sealed and bytes(tensors()["keys"].data)[:64] not in sealed
    )
    for secret in (None, SECRET[::-1]):
        with pytest.raises(StoredPrefixError):
            file_format.read(io.BytesIO(sealed), secret)
    with pytest.raises(StoredPrefixError):
        file_format.read(io.BytesIO(as_file()), SECRET)
    assert as_file(SECRET) != sealed, "each file has its own nonces"


class Disk:
    """Folders of stages on a volume with a clock and free space of its own."""

    def __init__(self, root: Path, most_bytes: int = 10**9, secret: bytes | None = None) -> None:
        self.root, self.free, self.now = root, 100 * GIB, time.time()
        self.limits = FileLimits(most_bytes, 2)
        self.secret = secret

    def folder(self, name: str = "m/layers-0-4/rank-0", maker: str = "me", *, is_open: bool = True) -> StageFolder:
        made = StageFolder(
            self.root, name, maker, self.limits, self.secret, lambda: self.now, lambda _: (200 * GIB, self.free)
        )
        assert not is_open or made.open()
        return made

    def write(self, folder: StageFolder, number: int) -> bytes:
        key = number.to_bytes(16, "big")
        folder.write(about(key), tensors(number), lambda _: None)
        path = next(folder.path.glob(f"{key.hex()}-*.kv"))
        os.utime(path, (self.now, self.now))
        self.now += 1
        return key


@pytest.mark.parametrize("secret", [None, SECRET])
def test_files_survive_a_restart(tmp_path: Path, secret: bytes | None) -> None:
    disk = Disk(tmp_path, secret=secret)
    folder = disk.folder()
    keys = [disk.write(folder, number) for number in range(3)]
    folder.close()
    again = disk.folder()
    assert [one.key for one in again.known()] == keys
    assert same(again.read(keys[1])[1], tensors(1))
    assert all(path.stat().st_mode & 0o077 == 0 for path in again.path.glob("*.kv"))


def test_damaged_cut_and_foreign_files_are_misses_and_are_removed(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    folder = disk.folder()
    keys = [disk.write(folder, number) for number in range(3)]
    paths = [next(folder.path.glob(f"{key.hex()}-*.kv")) for key in keys]
    paths[0].write_bytes(paths[0].read_bytes()[:-5])
    data = bytearray(paths[1].read_bytes())
    data[-1] ^= 1
    paths[1].write_bytes(data)
    for key in keys[:2]:
        with pytest.raises(StoredPrefixError):
            folder.read(key)
    assert [path.exists() for path in paths] == [False, False, True]
    (folder.path / f"{'ab' * 16}-9.kv").write_bytes(b"no safetensors")
    paths[2].rename(folder.path / f"{'cd' * 16}-70.kv")
    (folder.path / "left-over.new").write_bytes(b"x")
    folder.close()
    assert disk.folder().known() == []
    assert {path.name for path in folder.path.iterdir()} == {"lock"}
    with pytest.raises(StoredPrefixError):
        folder.read(keys[2])


def test_files_of_another_version_are_removed(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    folder = disk.folder()
    disk.write(folder, 1)
    folder.close()
    assert disk.folder(maker="a newer version").known() == []
    assert not list(stored_files(tmp_path))


def test_the_least_recently_used_files_of_all_stages_give_way_but_not_pinned_ones(tmp_path: Path) -> None:
    size = len(as_file())
    disk = Disk(tmp_path, most_bytes=3 * size)
    one, other = disk.folder("m/a/rank-0"), disk.folder("m/b/rank-0")
    keys = [disk.write(one, 1), disk.write(other, 2), disk.write(one, 3)]
    next(stored_files(other.path)).pin.touch()
    one.read(keys[0])  # which makes it the last used one
    disk.write(other, 4)
    assert {bytes.fromhex(file.key) for file in stored_files(tmp_path)} == {keys[0], keys[1], (4).to_bytes(16, "big")}
    assert [about.key for about in one.known()] == [keys[0], keys[2]], "the other process has not looked yet"
    with pytest.raises(StoredPrefixError):
        one.read(keys[2])
    assert [about.key for about in one.known()] == [keys[0]]


def test_a_file_that_nobody_uses_expires_unless_it_is_pinned(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    folder = disk.folder()
    old, pinned = disk.write(folder, 1), disk.write(folder, 2)
    (folder.path / f"{pinned.hex()}.pin").touch()
    disk.now += 2 * DAY_S
    young = disk.write(folder, 3)
    assert {about.key for about in folder.known()} == {pinned, young} and folder.is_pinned(pinned)
    assert old.hex() not in {file.key for file in stored_files(tmp_path)}


@pytest.mark.parametrize(("free", "fits"), [(GIB + 10**6, True), (GIB, False)])
def test_some_of_the_volume_stays_free(tmp_path: Path, free: int, fits: bool) -> None:
    disk = Disk(tmp_path)
    folder = disk.folder()
    disk.free = free
    if fits:
        disk.write(folder, 1)
    else:
        with pytest.raises(OSError, match="No space left"):
            disk.write(folder, 1)
    assert len(list(folder.path.glob("*"))) == 1 + fits


def test_a_file_larger_than_the_limit_costs_no_other_file(tmp_path: Path) -> None:
    disk = Disk(tmp_path, most_bytes=len(as_file()) + 10)
    folder = disk.folder()
    key = disk.write(folder, 1)
    with pytest.raises(OSError, match="No space left"):
        folder.write(about(KEY), tensors(tokens=5000), lambda _: None)
    assert [about.key for about in folder.known()] == [key]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    folder = disk.folder()

    def stop(_: int) -> None:
        raise OSError("the stage ends")

    with pytest.raises(OSError, match="ends"):
        folder.write(about(), tensors(), stop)
    assert [path.name for path in folder.path.iterdir()] == ["lock"]


def test_a_second_process_does_not_use_the_same_folder(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    first = disk.folder()
    program = (
        "import sys; from pathlib import Path; from exo_mesh.rings.prefix_disk.folder import FileLimits, StageFolder\n"
        f"print(StageFolder(Path({str(tmp_path)!r}), {first.name!r}, 'me', FileLimits(10**9, 2)).open())"
    )

    def opened() -> str:
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()

    assert opened() == "False"
    first.close()
    assert opened() == "True"


_WRITER = """
import sys
from pathlib import Path
import numpy as np
from exo_mesh.domain.tensor import Tensor
from exo_mesh.rings.prefix_disk.file_format import StoredPrefix
from exo_mesh.rings.prefix_disk.folder import FileLimits, StageFolder

folder = StageFolder(Path(sys.argv[1]), "s", "me", FileLimits(10**9, 2), bytes(32) if sys.argv[2] == "sealed" else None)
assert folder.open()
print("open", flush=True)
number = 0
while True:
    number += 1
    key = (number % 4).to_bytes(16, "big")
    data = {"keys": Tensor.from_numpy(np.full((256, 1024), number % 4, np.float32))}
    folder.write(StoredPrefix("me", key, 70, 70, b"h" * 16), data, lambda _: None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "sealed"])
def test_after_a_kill_at_any_moment_of_a_write_every_file_is_whole(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng()
    found = 0
    for _ in range(25):
        command = [sys.executable, "-c", _WRITER, str(tmp_path), kind]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and child.stdout.readline() == "open\n"
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(rng.uniform(0.0, 0.15))  # the moment is random, and nothing is measured
            child.kill()
        folder = StageFolder(tmp_path, "s", "me", FileLimits(10**9, 2), bytes(32) if kind == "sealed" else None)
        assert folder.open(), "the lock ended with the process"
        for one in folder.known():
            assert set(folder.read(one.key)[1]["keys"].numpy().flat) == {float(int.from_bytes(one.key, "big"))}
            found += 1
        assert not list(folder.path.glob("*.new"))
        folder.close()
    assert found, "some file was whole"

"""A full disk: what is written, what is said, and that it mends. With a volume of its own where root may mount one."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import ChildNode, client_of
from exo_mesh.machine.disk import Disk
from exo_mesh.mesh.membership.identity import take_identity
from tests.support.processes import QUIET_FLAGS, clean_environ, eventually, run

MIB = 2**20


class Volume:
    def __init__(self, free_bytes: int, total_bytes: int = 10**12) -> None:
        self.free_bytes, self.total_bytes = free_bytes, total_bytes

    def read(self, path: Path) -> tuple[int, int]:
        return self.total_bytes, self.free_bytes


def code(disk: Disk) -> str:
    problem = disk.problem()
    return problem.code if problem else ""


def test_nothing_is_written_below_the_floor_and_it_says_so_until_there_is_room(tmp_path: Path) -> None:
    volume, now = Volume(100 * MIB), [0.0]
    disk = Disk(tmp_path, now=lambda: now[0], read=volume.read)
    file = tmp_path / "kept" / "a.json"
    assert disk.write(file, "one", "an answer") and code(disk) == "disk_low", "small files are still written"
    volume.free_bytes = 60 * MIB
    assert not disk.write(file, "two", "an answer")
    problem = disk.problem()
    assert problem is not None and problem.code == "disk_full" and problem.level == "degraded"
    assert "62.9 MB" in problem.message and "free space" in problem.remedy
    assert file.read_text() == "one" and list(file.parent.iterdir()) == [file], "whole or not at all"
    volume.free_bytes, now[0] = 10**11, 5.0
    disk.check()
    assert code(disk) == "" and disk.refused == 1 and disk.write(file, "three", "an answer")


@pytest.mark.parametrize(
    ("free", "total", "found"),
    [(11, 100, ""), (9, 100, "disk_low"), (1.9, 100, "disk_low"), (2.1, 30, "disk_low"), (1.4, 30, "disk_low"),
     (4, 30, "")],
)  # fmt: skip
def test_the_node_says_in_time_that_no_other_model_fits(tmp_path: Path, free: float, total: int, found: str) -> None:
    disk = Disk(tmp_path, read=lambda _: (total * 10**9, int(free * 10**9)))
    assert code(disk) == found
    assert disk.has_room(10**8), "small files are still written"


def test_a_small_volume_is_used_down_to_a_share_of_it(tmp_path: Path) -> None:
    volume = Volume(2 * MIB, 32 * MIB)
    disk = Disk(tmp_path, read=volume.read)
    assert disk.floor_bytes == int(1.6 * MIB) and disk.has_room(100) and not disk.has_room(MIB)


def test_a_volume_that_cannot_be_measured_is_written_to(tmp_path: Path) -> None:
    def unreadable(path: Path) -> tuple[int, int]:
        raise OSError(errno.EIO, "no")

    assert Disk(tmp_path, read=unreadable).write(tmp_path / "a", "one", "an answer")


def test_threads_that_write_the_same_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    disk, file = Disk(tmp_path), tmp_path / "a.json"
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda number: disk.write(file, f"{number:04}" * 100, "a file"), range(400)))
    assert all(written) and not disk.refused and disk.problem() is None
    assert len({file.read_text()[start : start + 4] for start in range(0, 400, 4)}) == 1


def test_a_directory_that_may_not_be_written_is_another_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    disk = Disk(tmp_path)
    assert not disk.write(tmp_path / "file" / "a", "one", "an answer")
    assert code(disk) == "disk_unwritable"


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 16 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    mounted = tmp_path / "volume"
    mounted.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(mounted)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip("this container may not mount: " + done.stderr.decode().strip())
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def fill(volume: Path) -> Path:
    """Take all that is left."""
    file = volume / "filler"
    with file.open("wb", buffering=0) as out:
        try:
            while out.write(b"x" * 4096):
                pass
        except OSError as exc:
            assert exc.errno == errno.ENOSPC
    return file


def test_an_identity_survives_a_start_on_a_full_disk(small_volume: Path) -> None:
    first = take_identity(small_volume / "home")
    first.release()
    fill(small_volume)
    again = take_identity(small_volume / "home")
    again.release()
    assert again.id == first.id and again.incarnation == first.incarnation + 1


def serve(home: Path, log: Path) -> ChildNode:
    return ChildNode([*QUIET_FLAGS, "--api-port", "0"], log, clean_environ(home))


def reasons(api: ApiClient) -> dict[str, dict[str, str]]:
    return {reason["code"]: reason for reason in api.get("/health")["reasons"]}


def answers(api: ApiClient) -> bool:
    body = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 5}
    return bool(api.post("/v1/chat/completions", body, 60)["usage"]["completion_tokens"] == 5)


@pytest.mark.extended
def test_a_node_serves_on_a_full_disk_says_so_and_recovers(small_volume: Path, tmp_path: Path) -> None:
    node = serve(small_volume / "home", tmp_path / "node.log")
    try:
        api = client_of(node.wait_ready(60))
        filler = fill(small_volume)
        assert eventually(lambda: "disk_full" in reasons(api))
        assert answers(api), "the model is placed, its engine asked and a runner started without a byte written"
        assert "free space" in reasons(api)["disk_full"]["remedy"]
        shown = run(["status", "--api-url", api.url], tmp_path / "elsewhere").stdout
        assert "degraded: " in shown and "-> free space on that volume" in shown
        assert api.get("/health")["status"] == "degraded" and api.get("/readyz")["ready"]
        assert "exo_mesh_disk_free_bytes" in api.text("/metrics")
        filler.unlink()
        assert eventually(lambda: "disk_full" not in reasons(api), 30)
        assert answers(api)
    finally:
        node.stop()


@pytest.mark.slow
def test_a_limit_on_file_sizes_does_not_end_serving(tmp_path: Path) -> None:
    """Without root: every write beyond the limit fails, as on a full disk."""
    node = serve(tmp_path / "home", tmp_path / "node.log")
    try:
        api = client_of(node.wait_ready(60))
        process = psutil.Process(node.pid)
        # its log goes to a file, too; what it would write is lost, and that is all
        process.rlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
        assert answers(api)
        assert eventually(lambda: "disk_full" in reasons(api))
        process.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert eventually(lambda: "disk_full" not in reasons(api), 30)
        assert answers(api)
    finally:
        node.stop()

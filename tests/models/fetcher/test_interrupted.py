"""A fetcher that is killed, or whose disk becomes full: what it wrote down is true, and the next one goes on there."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exo_mesh.models.fetcher.wire import FetchFailed
from exo_mesh.weights.card import read_card
from exo_mesh.weights.fetched import part_of, read_manifest
from tests.models.fetcher.conftest import REPO
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.fetcher_child import Fetched, FetcherChild, fetcher_environ, is_same_model, wrong_files
from tests.support.hub import LoopbackHub

pytestmark = pytest.mark.extended

BIGGER = TinyModel(layers=8, hidden=256, heads=4, kv_heads=2, intermediate=768, vocab=3000, shards=4)


@pytest.fixture(scope="module")
def bigger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 30 MB in four files."""
    return write_checkpoint(tmp_path_factory.mktemp("bigger") / "model", BIGGER, repeat=True)


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def weights_bytes(original: Path) -> int:
    return sum(file.stat().st_size for file in original.glob("*.safetensors"))


def present_and_right(model_dir: Path, original: Path) -> int:
    """How many bytes the manifest says are there, after a look at each of them."""
    if not model_dir.exists():
        return 0
    manifest = read_manifest(model_dir)
    assert manifest is not None and read_card(model_dir, REPO) == read_card(original, REPO)
    for name, file in manifest.files.items():
        whole = model_dir / name
        content = (whole if whole.exists() else part_of(model_dir, name)).read_bytes()
        right = (original / name).read_bytes()
        assert len(content) == len(right)
        assert all(content[start:stop] == right[start:stop] for start, stop in file.present)
    return manifest.present_bytes


def test_a_killed_fetcher_leaves_what_the_next_one_goes_on_with(tmp_path: Path, bigger: Path) -> None:
    draw = random.Random(14)
    model_dir = tmp_path / "models" / "m"
    with LoopbackHub() as hub:
        hub.add(REPO, bigger)
        hub.faults.pause_s = 0.02
        environ = fetcher_environ(hub, tmp_path / "hf")
        present = 0
        for _ in range(5):
            with FetcherChild(environ) as child:
                aim = hub.sent_bytes + draw.randrange(5_000_000)
                if not isinstance(child.resolve(REPO, model_dir), FetchFailed):
                    child.begin_fetch(model_dir)
                until(lambda aim=aim: hub.sent_bytes >= aim or child.process.poll() is not None)  # type: ignore[misc]
                child.process.kill()
            assert not wrong_files(model_dir, bigger)
            now_present = present_and_right(model_dir, bigger)
            assert now_present >= present
            present = now_present
            if present > 25_000_000:
                hub.faults.pause_s = 0.05
        hub.faults.pause_s = 0
        with FetcherChild(environ) as child:
            answer = child.pull(REPO, model_dir)
        assert isinstance(answer, Fetched) and is_same_model(model_dir, bigger)
        assert answer.num_bytes.get("", 0) == weights_bytes(bigger) - present, "what was there is not fetched again"


def test_a_skeleton_that_was_not_finished_is_made_again(tmp_path: Path, bigger: Path) -> None:
    model_dir = tmp_path / "models" / "org" / "m"
    with LoopbackHub() as hub:
        hub.add(REPO, bigger)
        environ = fetcher_environ(hub, tmp_path / "hf")
        hub.faults.hold.set()
        with FetcherChild(environ) as child:
            child.send_resolve(REPO, model_dir)
            until((model_dir.parent / ".fetch-m").is_dir)
            child.process.kill()
        assert not model_dir.exists()
        hub.faults.hold.clear()
        with FetcherChild(environ) as child:
            assert isinstance(child.pull(REPO, model_dir), Fetched)
        assert is_same_model(model_dir, bigger) and [path.name for path in model_dir.parent.iterdir()] == ["m"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.skipif(not shutil.which("mount"), reason="mount is not there")
def test_a_disk_that_becomes_full_is_one_clear_error_and_keeps_what_came(
    tmp_path: Path, small_disk: Path, bigger: Path
) -> None:
    model_dir = small_disk / "models" / "m"
    with LoopbackHub() as hub, FetcherChild(fetcher_environ(hub, tmp_path / "hf")) as child:
        hub.add(REPO, bigger)
        assert not isinstance(child.resolve(REPO, model_dir), FetchFailed)
        before = hub.sent_bytes
        hub.faults.pause_s = 0.02
        child.begin_fetch(model_dir)
        until(lambda: hub.sent_bytes - before > 8_000_000)
        with (small_disk / "other").open("wb") as other:
            free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
            os.posix_fallocate(other.fileno(), 0, max(2**20, free - 4_000_000))
        answer = child.answer()
        assert isinstance(answer, FetchFailed)
        assert "there is no room on the disk for org/tiny" in answer.message and answer.is_final
        assert "free disk space" in answer.remedy
        assert not wrong_files(model_dir, bigger)
        kept = present_and_right(model_dir, bigger)
        assert kept > 5_000_000
        (small_disk / "other").unlink()
        hub.faults.pause_s = 0
        last = child.fetch(model_dir)
        assert isinstance(last, Fetched) and is_same_model(model_dir, bigger)
        assert last.num_bytes[""] == weights_bytes(bigger) - kept

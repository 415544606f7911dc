"""Fetching on one node: shared by those who want the same, told to the mesh, cancelled, and refused or given room."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from exo_mesh.base.tasks import ChangeSignal
from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.download import DownloadInfo, DownloadState
from exo_mesh.domain.spans import merged
from exo_mesh.errors import FetchError, InputError, ModelError
from exo_mesh.machine.disk import Disk
from exo_mesh.models.downloads.rules import FetchRules
from exo_mesh.models.downloads.service import Downloads
from exo_mesh.models.downloads.sources import FetchNeed
from exo_mesh.models.downloads.tally import DownloadTally, FetchTally
from exo_mesh.models.fetcher.wire import Share, Source
from exo_mesh.models.local_files import MAX_PULLS, USE_FILE, LocalFiles
from exo_mesh.models.mesh_store import StoreRules
from exo_mesh.weights.fetched import MANIFEST_FILE, read_manifest, write_manifest
from exo_mesh.weights.store import ModelStore
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.nodes import until
from tests.support.partial import copy_partly

LAYERS = 4


class Alone:
    """The membership of a node without peers. told: its records of downloads, in order. elsewhere: those of others."""

    def __init__(self) -> None:
        self.own = PeerInfo("own", 1, "own", "", 1, "", ())
        self.peers: list[Any] = []
        self.changed = ChangeSignal()
        self.told: list[tuple[str, DownloadInfo | None]] = []
        self.used: list[str] = []
        self.elsewhere: list[tuple[str, DownloadInfo]] = []
        self.view = self

    def records_of_instances(self) -> list[Any]:
        return [("own", SimpleNamespace(plan=SimpleNamespace(model=name, member_ids=()))) for name in self.used]

    def describe(self, own: PeerInfo) -> None:
        self.own = own

    def downloads(self) -> list[tuple[str, DownloadInfo]]:
        return self.elsewhere

    def put_download(self, model: str, info: DownloadInfo | None) -> None:
        self.told.append((model, info))

    def last(self, model: str) -> DownloadInfo | None:
        return dict(self.told).get(model)


class MarkingFetcher:
    """Says at once that all came, once `gate` is open; `failures` are raised first. asked: the shares of each call."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[FetchError] = []
        self.asked: list[Sequence[Share]] = []

    async def resolve(self, name: str, model_dir: Path, **where: Any) -> Mapping[str, int]:
        raise FetchError("no such model")

    async def fetch(
        self,
        model_dir: Path,
        shares: Sequence[Share],
        on_progress: Callable[[int, int, Mapping[str, int]], None] | None = None,
    ) -> Mapping[str, int]:
        self.asked.append(shares)
        if self.failures:
            raise self.failures.pop(0)
        total = sum(stop - start for share in shares for spans in share.pieces.values() for start, stop in spans)
        assert on_progress is not None
        on_progress(0, total, {})
        await self.gate.wait()
        manifest = read_manifest(model_dir)
        assert manifest is not None
        for share in shares:
            for name, spans in share.pieces.items():
                file = manifest.files[name]
                file.present = list(merged([*file.present, *spans]))
        write_manifest(model_dir, manifest)
        on_progress(total, total, {"": total})
        return {"": total}

    async def verify(self, model_dir: Path, files: Sequence[str], *rest: Any, **more: Any) -> tuple[str, ...]:
        return ()

    async def search(self, query: str, limit: int) -> Sequence[Any]:
        return ()


class Bench:
    """A node's downloads with models `names` of which nothing but the headers is there, in this order of use."""

    def __init__(self, root: Path, *names: str, free_bytes: int = 10**9, **rules: Any) -> None:
        write_checkpoint(root / "whole", TinyModel(layers=LAYERS))
        for age, name in enumerate(reversed(names)):
            copy_partly(root / "whole", root / "models" / name, {}, name)
            (root / "models" / name / USE_FILE).write_text("{}")
            os.utime(root / "models" / name / USE_FILE, (10**9 - age, 10**9 - age))
            _set_repo(root / "models" / name)
        self.membership = Alone()
        self.free_bytes = free_bytes
        self.disk = disk = Disk(root, read=lambda path: (10**12, self.free_bytes))
        store = ModelStore((root / "models",))
        self.files = LocalFiles(root / "models", store.card, store.find, disk)
        self.fetcher = MarkingFetcher()
        self.catalogue: Any = SimpleNamespace(local_card=store.card, local_dir=store.find)
        self.restart(**rules)

    def restart(self, **rules: Any) -> None:
        """Go on with the same files and other rules."""
        membership: Any = self.membership

        async def on_change() -> None:
            pass

        async def on_wrong(model: str, loading_waits: bool) -> None:
            pass

        self.downloads = Downloads(
            membership, self.catalogue, self.files, self.fetcher, self.disk, FetchRules(**rules), on_change, on_wrong
        )

    async def reboot(self) -> None:
        """The node ends, and starts again with the same files."""
        await self.downloads.close()
        self.restart()

    async def ensure(self, model: str, layers: tuple[int, int]) -> list[tuple[int, int]]:
        return [(step.done, step.total) async for step in self.downloads.ensure(model, layers)]


def _set_repo(model_dir: Path) -> None:
    manifest = read_manifest(model_dir)
    assert manifest is not None
    manifest.repo, manifest.revision = "org/m", "c0ffee"
    write_manifest(model_dir, manifest)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path, "m")
    yield made
    await made.downloads.close()


async def test_what_is_here_is_not_fetched(bench: Bench) -> None:
    assert await bench.ensure("m", (0, 2))
    assert await bench.ensure("m", (0, 2)) == [] == await bench.ensure("m", (1, 2))
    (shares,) = bench.fetcher.asked
    assert [share.sources for share in shares] == [(Source(),)]
    assert bench.files.missing("m", (2, 4))


async def test_who_wants_the_same_joins_a_fetch(bench: Bench) -> None:
    bench.fetcher.gate.clear()
    both = [asyncio.create_task(bench.ensure("m", (0, 2))) for _ in range(2)]
    await until(lambda: bench.fetcher.asked)
    bench.fetcher.gate.set()
    assert all(await asyncio.gather(*both)) and len(bench.fetcher.asked) == 1


async def test_the_mesh_hears_of_a_fetch_at_most_twice_a_second(bench: Bench) -> None:
    began = asyncio.get_running_loop().time()
    await bench.ensure("m", (0, 2))
    await until(lambda: (info := bench.membership.last("m")) and info.state is DownloadState.COMPLETED)
    took_s = asyncio.get_running_loop().time() - began
    assert len(bench.membership.told) <= 1 + 2 * took_s
    told = bench.membership.last("m")
    assert told is not None and told.done_bytes == told.total_bytes > told.from_hub_bytes > 0, "headers were there"
    assert told.layers == (0, 2)


async def test_what_is_on_the_disk_counts_from_the_start(bench: Bench) -> None:
    await bench.ensure("m", (0, 3))
    bench.fetcher.gate.clear()
    waiter = asyncio.create_task(bench.ensure("m", (0, 4)))
    await until(lambda: (info := bench.membership.last("m")) and info.layers == (0, 4) and info.done_bytes)
    told = bench.membership.last("m")
    assert told is not None and 0.5 < told.done_bytes / told.total_bytes < 1.0 and not told.from_hub_bytes
    bench.fetcher.gate.set()
    assert await waiter


PULLED: list[tuple[int, int] | None] = [(1, 3), None]


@pytest.mark.parametrize("layers", PULLED)
async def test_an_unfinished_pull_goes_on_after_a_restart_and_a_finished_one_does_not(
    bench: Bench, layers: tuple[int, int] | None
) -> None:
    bench.fetcher.gate.clear()
    await bench.downloads.pull("m", "", {"own": layers})
    await until(lambda: bench.fetcher.asked)
    await bench.reboot()
    assert bench.files.missing("m", layers)
    bench.fetcher.gate.set()
    await bench.downloads.resume_pulls()
    await until(lambda: not bench.files.unfinished_pulls())
    assert not bench.files.missing("m", layers) and len(bench.fetcher.asked) == 2
    await bench.reboot()
    await bench.downloads.resume_pulls()
    assert len(bench.fetcher.asked) == 2


async def test_a_failed_pull_is_tried_again_after_a_restart_and_a_cancelled_one_is_not(bench: Bench) -> None:
    bench.fetcher.failures = [FetchError("the disk is full", is_final=True)]
    await bench.downloads.pull("m", "", {"own": (0, 2)})
    await until(bench.downloads.failed_here)
    await bench.reboot()
    bench.fetcher.gate.clear()
    await bench.downloads.resume_pulls()
    await until(lambda: len(bench.fetcher.asked) == 2)
    assert await bench.downloads.cancel("m")
    await bench.reboot()
    await bench.downloads.resume_pulls()
    assert len(bench.fetcher.asked) == 2


async def test_the_fetches_of_a_node_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.models.downloads.jobs.MAX_JOBS", 2)
    bench = Bench(tmp_path, "a", "b", "c")
    bench.fetcher.gate.clear()
    for name in "ab":
        await bench.downloads.pull(name, "", {"own": None})
    with pytest.raises(FetchError, match="this node runs 2 downloads"):
        await bench.downloads.pull("c", "", {"own": None})
    bench.fetcher.gate.set()
    await until(lambda: [name for name, _ in bench.files.unfinished_pulls()] == ["c"])
    await bench.downloads.pull("c", "", {"own": None})
    await until(lambda: not bench.files.unfinished_pulls())
    await bench.downloads.close()


def test_what_is_kept_of_whole_models_has_a_bound_and_goes_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exo_mesh.models.local_files.MAX_HOLDINGS", 3)
    names = [f"m{number}" for number in range(6)]
    for name in names:
        write_checkpoint(tmp_path / name, TinyModel(layers=1))
    store = ModelStore((tmp_path,))
    files = LocalFiles(tmp_path, store.card, store.find, Disk(tmp_path))
    for name in names[:5]:
        assert files.holding(name).files
    assert [kept.name for kept in files._holdings] == ["m2", "m3", "m4"]
    for name in ("m2", "m4"):
        shutil.rmtree(tmp_path / name)
    assert files.holding("m5").files and [kept.name for kept in files._holdings] == ["m3", "m5"]


async def test_what_was_fetched_for_a_ring_is_left_to_the_next_request(bench: Bench) -> None:
    bench.fetcher.gate.clear()
    waiter = asyncio.create_task(bench.ensure("m", (0, 2)))
    await until(lambda: bench.fetcher.asked)
    await bench.reboot()
    await asyncio.gather(waiter, return_exceptions=True)
    await bench.downloads.resume_pulls()
    assert len(bench.fetcher.asked) == 1 and bench.files.unfinished_pulls() == []


def test_the_pulls_that_are_remembered_of_a_model_have_a_bound(tmp_path: Path) -> None:
    files = Bench(tmp_path, "m").files
    for start in range(MAX_PULLS + 4):
        files.note_pull("m", (start, start + 1))
    assert [layers for _, layers in files.unfinished_pulls()] == [
        (start, start + 1) for start in range(4, MAX_PULLS + 4)
    ]


async def test_a_cancelled_fetch_is_forgotten_and_its_waiters_hear_of_it(bench: Bench) -> None:
    bench.fetcher.gate.clear()
    waiter = asyncio.create_task(bench.ensure("m", (0, 2)))
    await until(lambda: bench.fetcher.asked)
    assert await bench.downloads.cancel("m") and not await bench.downloads.cancel("m")
    with pytest.raises(FetchError, match="cancelled"):
        await waiter
    assert bench.membership.last("m") is None and bench.downloads.failed_here() == []


async def test_a_fetch_that_is_cancelled_before_it_has_begun_can_be_started_again(bench: Bench) -> None:
    first = bench.downloads.jobs.start(FetchNeed("m", (0, 2), {"own": (0, 2)}))
    assert await bench.downloads.cancel("m") and first.is_done
    assert await bench.ensure("m", (0, 2)) and not bench.files.missing("m", (0, 2))


async def test_a_source_that_fails_is_planned_around(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.models.downloads.jobs.RETRY_S", 0.0)
    bench.fetcher.failures = [FetchError("the peer is gone")]
    assert await bench.ensure("m", (0, 2)) and len(bench.fetcher.asked) == 2


async def test_it_is_planned_again_when_another_peer_begins_the_same_and_not_when_that_is_done(bench: Bench) -> None:
    bench.fetcher.gate.clear()
    waiter = asyncio.create_task(bench.ensure("m", (0, 2)))
    await until(lambda: len(bench.fetcher.asked) == 1)
    for state, num_plans in ((DownloadState.ONGOING, 2), (DownloadState.COMPLETED, 2)):
        bench.membership.elsewhere = [("other", DownloadInfo("m", state, layers=(0, 4)))]
        bench.membership.changed.beat()
        await until(lambda num_plans=num_plans: len(bench.fetcher.asked) == num_plans)  # type: ignore[misc]
    bench.fetcher.gate.set()
    assert await waiter and len(bench.fetcher.asked) == 2


async def test_a_failure_stays_to_be_seen_until_it_is_tried_again(bench: Bench) -> None:
    bench.fetcher.failures = [FetchError("gated", remedy="accept the license", is_final=True)]
    with pytest.raises(FetchError, match="gated"):
        await bench.ensure("m", (0, 2))
    (failed,) = bench.downloads.failed_here()
    tally = bench.downloads.tally
    assert (tally.running, tally.failed) == (0, {"fetch_failed": 1}) and not tally.received_bytes.total()
    assert (failed.reason, failed.remedy) == ("gated", "accept the license")
    assert await bench.ensure("m", (0, 2)) and bench.downloads.failed_here() == []
    assert tally.received_bytes["hub"] == tally.received_bytes.total() > 0


async def test_without_room_nothing_is_fetched_and_the_numbers_are_said(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "m", free_bytes=10**6)
    with pytest.raises(FetchError, match="only 0 MB may be used") as caught:
        await bench.ensure("m", (0, 2))
    assert caught.value.is_final and "exo-mesh rm" in caught.value.remedy and not bench.fetcher.asked
    await bench.downloads.close()


async def test_what_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "older", "used", "newer", "m", max_bytes=1)
    taken = {one.name: one.num_bytes for one in bench.files.fetched()}
    need = sum(stop - start for spans in bench.files.missing("m", (0, 2)).values() for start, stop in spans)
    bench.membership.used = ["used"]
    bench.restart(max_bytes=need + taken["m"] + taken["used"] + taken["newer"])
    assert await bench.ensure("m", (0, 2))
    assert {one.name for one in bench.files.fetched()} == {"used", "newer", "m"}
    await bench.downloads.close()


async def test_models_pulled_by_name_stay_unless_that_is_allowed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "pulled", "m", max_bytes=1)
    bench.files.touch("pulled", is_pinned=True)
    with pytest.raises(FetchError, match="--models-max-size") as caught:
        await bench.ensure("m", (0, 2))
    assert "--evict-pinned" in caught.value.remedy
    need = sum(stop - start for spans in bench.files.missing("m", (0, 1)).values() for start, stop in spans)
    bench.restart(max_bytes=need + bench.files.fetched()[0].num_bytes, evict_pinned=True)
    assert await bench.ensure("m", (0, 1))
    assert [one.name for one in bench.files.fetched()] == ["m"]
    await bench.downloads.close()


async def test_staged_copies_that_nothing_uses_go_by_their_age(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "older", "used", "newer", "own", "pulled")
    for name in ("older", "used", "newer"):
        bench.files.touch(name, store="host")
    bench.files.touch("pulled", store="host")
    bench.files.touch("pulled", is_pinned=True)
    for age, name in enumerate(("newer", "used", "older")):
        os.utime(tmp_path / "models" / name / USE_FILE, (10**9 - age, 10**9 - age))
    bench.membership.used = ["used"]
    (num_bytes,) = {one.num_bytes for one in bench.files.fetched() if one.name == "newer"}
    bench.restart(store=StoreRules(keep_bytes=num_bytes))
    assert await bench.downloads.room.sweep()
    assert {one.name for one in bench.files.fetched()} == {"used", "newer", "own", "pulled"}
    room = bench.downloads.room
    assert await room.sweep(keeps_recent=False) and not await room.sweep(keeps_recent=False)
    assert {one.name for one in bench.files.fetched()} == {"used", "own", "pulled"}
    bench.membership.used = []
    bench.restart(store=StoreRules(keep_bytes=0))
    await bench.downloads.room.sweep_if_changed()
    assert {one.name for one in bench.files.fetched()} == {"own", "pulled"}, "its instance has gone"


async def test_the_host_of_the_store_deletes_nothing_to_make_room(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "canonical", "m", max_bytes=1, store=StoreRules(is_here=True))
    with pytest.raises(FetchError, match="--models-max-size"):
        await bench.ensure("m", (0, 2))
    assert {one.name for one in bench.files.fetched()} == {"canonical", "m"}
    await bench.downloads.close()


async def test_a_model_in_use_cannot_be_deleted(bench: Bench, tmp_path: Path) -> None:
    bench.membership.used = ["m"]
    with pytest.raises(InputError, match="in use"):
        await bench.downloads.delete("m")
    bench.membership.used = []
    took = await bench.downloads.room.storage()
    assert await bench.downloads.delete("m") == took["used_bytes"] > 0
    assert not (tmp_path / "models" / "m").exists() and await bench.downloads.delete("m") is None


async def test_a_deletion_that_was_killed_is_finished_by_the_next_one(bench: Bench, tmp_path: Path) -> None:
    leftover = tmp_path / "models" / ".fetch-gone-1-2"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"x")
    await bench.downloads.delete("m")
    assert not leftover.exists()


async def test_a_model_whose_manifest_is_damaged_can_be_deleted(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "models" / "m" / MANIFEST_FILE).write_text("garbage")
    with pytest.raises(ModelError, match=r"cannot be used: .* `exo-mesh rm m`, .*`exo-mesh pull m`"):
        await bench.ensure("m", (0, 2))
    assert await bench.downloads.delete("m")
    assert not (tmp_path / "models" / "m").exists()


@pytest.mark.parametrize("name", ["plain", "plain/below", "org/plain", "org", "no!", "a/b/c", "../models/m"])
async def test_what_is_no_model_is_not_deleted_and_that_is_no_failure(bench: Bench, tmp_path: Path, name: str) -> None:
    (tmp_path / "models" / "org").mkdir()
    for file in ("plain", "org/plain"):
        (tmp_path / "models" / file).write_text("mine")
    assert await bench.downloads.delete(name) is None
    assert (tmp_path / "models" / "plain").read_text() == (tmp_path / "models" / "org" / "plain").read_text() == "mine"
    assert (tmp_path / "models" / "m").exists()


async def test_files_that_cannot_be_deleted_are_named_with_the_reason(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(FetchError, match="the files of m cannot be deleted: Permission denied"):
        await bench.downloads.delete("m")


async def test_files_of_no_model_in_the_place_of_one_are_named_as_the_reason(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(*args: Any, **where: Any) -> Mapping[str, int]:  # as the fetcher does where something is
        return {}

    monkeypatch.setattr(bench.fetcher, "resolve", resolve)
    (tmp_path / "models" / "other").mkdir()
    (tmp_path / "models" / "other" / "notes.txt").write_text("mine")
    with pytest.raises(FetchError, match="the directory of other "):
        await bench.downloads.resolve("other", "org/other", "main")


async def test_a_node_that_fetches_nothing_says_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "m", fetches="")
    with pytest.raises(FetchError, match="--no-fetch"):
        await bench.ensure("m", (0, 2))
    assert bench.downloads.room.num_bytes == 0
    await bench.downloads.close()


async def test_offline_it_says_which_bytes_no_peer_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.models.downloads.jobs.RETRY_S", 0.0)
    bench = Bench(tmp_path, "m", fetches="peers")
    with pytest.raises(FetchError, match="on no live peer") as caught:
        await bench.ensure("m", (0, 2))
    assert "--offline" in caught.value.remedy
    await bench.downloads.close()


async def test_storage_lists_what_was_fetched(bench: Bench) -> None:
    storage = await bench.downloads.room.storage()
    (model,) = storage["models"]
    assert model["name"] == "m" and not model["whole"] and not model["pinned"] and not model["in_use"]
    assert storage["used_bytes"] == model["bytes"] > 0


def test_bytes_are_counted_by_source_and_those_of_a_restarted_fetcher_once() -> None:
    tally = DownloadTally()
    fetch = FetchTally(tally)
    for done, num_bytes in ((100, {}), (160, {"": 20, "p": 10}), (200, {"": 50, "p": 20}), (220, {"": 10})):
        fetch.take(done, num_bytes)
    assert tally.received_bytes == {"hub": 60, "peers": 20, "cache": 30}

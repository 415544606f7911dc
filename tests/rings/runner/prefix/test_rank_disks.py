"""The ranks of a tensor group have files of their own, and begin a sequence with them together or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from exo_mesh.domain.frame import NO_COPY, Copy, Frame, ListDisk, Op
from exo_mesh.domain.plan import Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor_group import RankWiring, TensorGroup
from exo_mesh.engine.contract import SavedSequence
from exo_mesh.errors import EngineError, RankLostError
from exo_mesh.rings.prefix_disk.folder import FileLimits
from exo_mesh.rings.runner.disk_parts import disk_store, ring_of
from exo_mesh.rings.runner.disk_store import RANK_TAKE_S, TAKE_S
from exo_mesh.rings.runner.prefix import disk_index
from exo_mesh.rings.runner.stage import Stage
from exo_mesh.rings.runner.stage_setup import DiskSetup, StageSetup
from tests.rings.runner.prefix.disk_ring import DEADLINE_S, DiskRing, SavingEngine, until
from tests.rings.runner.prefix.test_prefix_ring import answer, counts
from tests.rings.runner.test_stage_and_driver import BALLOT, expected

PROMPT = [3 + (7 * i) % 40 for i in range(400)]


class Votes:
    """What two ranks in two threads say, at the same place in their calls."""

    def __init__(self) -> None:
        self._said: list[bool] = []
        self._in, self._out = threading.Barrier(2, timeout=DEADLINE_S), threading.Barrier(2, timeout=DEADLINE_S)

    def all_say(self, mine: bool) -> bool:
        self._said.append(mine)
        self._in.wait()
        result = all(self._said)
        if self._out.wait() == 0:
            self._said.clear()
        self._in.wait()
        return result


class AgreeingEngine(SavingEngine):
    """One rank of a group of two."""

    def __init__(self, votes: Votes) -> None:
        super().__init__(True, False)
        self._votes = votes

    def agree(self, mine: bool) -> bool:
        return self._votes.all_say(mine)


class RankRing(DiskRing):
    """The first of its two stages is a tensor group of two ranks. second_has_disk: whether rank 1 has one."""

    def __init__(self, root: Path, *, second_has_disk: bool = True, agrees: bool = True) -> None:
        super().__init__(root / "rank-0", 2)
        votes = Votes()
        self.ranks: list[SavingEngine] = [AgreeingEngine(votes) if agrees else SavingEngine(True, False) for _ in "01"]
        self.engines[0] = self.ranks[0]
        self.second_store = self._store(root / "rank-1", 0, None, "rank 1")
        if second_has_disk:
            self.second_store.start()
        self.stages[0] = Stage(self.ranks[0], 0, is_rank=True, disk=self.stores[0])
        self.second = Stage(self.ranks[1], 0, is_rank=True, disk=self.second_store if second_has_disk else None)
        self._thread = ThreadPoolExecutor(1)

    def lap(self) -> None:
        beside = self._thread.submit(self.second.process, self.sent[0])
        super().lap()
        beside.result(DEADLINE_S)
        assert self.ranks[0].kv == self.ranks[1].kv

    def close(self) -> None:
        super().close()
        self.second_store.close(DEADLINE_S)
        self._thread.shutdown()

    def write_all(self) -> int:
        num_files = super().write_all()
        until(lambda: self.second_store.num_files >= num_files)
        return num_files


MakeRing = Callable[..., RankRing]


@pytest.fixture
def make_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRing]:
    """Makes a ring whose disks are the same each time, and closes the one before."""
    monkeypatch.setattr(disk_index, "SETTLED_S", 0.0)
    made: list[RankRing] = []

    def make(**changes: bool) -> RankRing:
        for ring in made:
            ring.close()
        made.append(RankRing(tmp_path, **changes))
        return made[-1]

    yield make
    for ring in made:
        ring.close()


def files(root: Path, rank: int | str = "*") -> list[Path]:
    """The files of the group's stage."""
    return list(root.glob(f"rank-{rank}/stage-0/*.kv"))


async def test_every_rank_reads_its_own_file_after_a_restart(make_ring: MakeRing, tmp_path: Path) -> None:
    cold = await answer(ring := make_ring(), "a", PROMPT)
    assert ring.write_all() == 1
    assert len(files(tmp_path)) == 2
    again = make_ring()
    assert await answer(again, "b", PROMPT) == cold == expected(PROMPT, 8, 2)
    assert again.disk.hits == 1 and not again.disk.misses
    assert counts(again) == [8] * 2
    again.check()


def spoil(files: Sequence[Path], how: str) -> None:
    """Make the first of two files one that its rank cannot use; the second is the other rank's."""
    file, other = files
    if how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "changed":
        data = bytearray(file.read_bytes())
        data[-100] ^= 0xFF
        file.write_bytes(data)
    else:
        file.write_bytes(other.read_bytes())


@pytest.mark.parametrize("how", ["gone", "cut", "changed", "foreign"])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_file_that_one_rank_cannot_use_is_a_miss_for_all(
    make_ring: MakeRing, tmp_path: Path, rank: int, how: str
) -> None:
    cold = await answer(ring := make_ring(), "a", PROMPT)
    ring.write_all()
    again = make_ring()
    again.driver.pump()
    again.run()  # the files are listed
    (mine,), (others,) = files(tmp_path, rank), files(tmp_path, 1 - rank)
    spoil((mine, others), how)
    assert await answer(again, "b", PROMPT) == cold
    assert again.disk.misses == 1 and again.cache.is_on
    assert min(counts(again)) == len(PROMPT) + 7, "all of it was computed"
    assert others.exists(), "the file of the other rank is as good as before"
    assert await answer(again, "c", PROMPT) == cold
    assert again.write_all() == 1, "it is written again"
    again.check()
    last = make_ring()
    last.driver.pump()
    last.run()  # the files are listed
    assert await answer(last, "d", PROMPT) == cold
    assert last.disk.hits == 1 and not last.disk.misses


async def test_a_rank_whose_engine_refuses_its_file_makes_all_compute_the_prompt(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = await answer(ring := make_ring(), "a", PROMPT)
    ring.write_all()
    again = make_ring()

    def refuse(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(again.ranks[1], "restore", refuse)
    assert await answer(again, "b", PROMPT) == cold
    assert again.disk.misses == 1
    again.check()


@pytest.mark.parametrize("missing", ["second_has_disk", "agrees"])
async def test_without_the_disk_of_one_rank_nothing_is_written(
    make_ring: MakeRing, tmp_path: Path, missing: str
) -> None:
    ring = make_ring(**{missing: False})
    assert await answer(ring, "a", PROMPT) == expected(PROMPT, 8, 2)
    assert ring.write_all() == 0 and not ring.disk.is_on
    assert not files(tmp_path)


async def test_a_write_that_one_rank_did_not_end_is_a_miss_and_is_done_again(
    make_ring: MakeRing, tmp_path: Path
) -> None:
    """As after a kill: rank 0 has the whole file, rank 1 a part under another name."""
    cold = await answer(ring := make_ring(), "a", PROMPT)
    ring.write_all()
    ring.close()
    (file,) = files(tmp_path, 1)
    part = file.with_suffix(".new")
    part.write_bytes(file.read_bytes()[:-100])
    file.unlink()
    again = make_ring()
    assert not part.exists()
    assert await answer(again, "b", PROMPT) == cold
    assert again.disk.misses == 1 and again.write_all() == 1
    again.check()
    last = make_ring()
    assert await answer(last, "c", PROMPT) == cold
    assert last.disk.hits == 1 and not last.disk.misses


class LonelyEngine(SavingEngine):
    """A rank whose group has lost another one."""

    def agree(self, mine: bool) -> bool:
        raise RankLostError("rank 1 is gone")


@pytest.mark.parametrize("op", [ListDisk(), Copy(1, 0, 64, 80, disk=b"k" * 16)])
def test_a_rank_that_is_lost_while_they_agree_ends_the_group(op: Op) -> None:
    stage = Stage(LonelyEngine(True, False), 0, is_rank=True)
    with pytest.raises(RankLostError):
        stage.process(Frame(BALLOT, 1, ops=(op,)))


@pytest.mark.parametrize("is_rank", [True, False])
async def test_ranks_wait_for_all_files_of_one_frame_no_longer_than_for_one(
    make_ring: MakeRing, monkeypatch: pytest.MonkeyPatch, is_rank: bool
) -> None:
    ring, waits = make_ring(), []

    def take(key: bytes, patience_s: float) -> SavedSequence:
        waits.append(patience_s)
        raise EngineError("the disk is slow")

    monkeypatch.setattr(ring.second_store, "take", take)
    engine = SavingEngine(True, False)
    monkeypatch.setattr(engine, "agree", lambda mine: mine, raising=False)
    stage = Stage(engine, 0, is_rank=is_rank, disk=ring.second_store)
    ops = tuple(Copy(number, 0, 64, 80, disk=bytes([number]) * 16) for number in (1, 2, 3))
    result = stage.process(Frame(BALLOT, 1, ops=ops))
    assert [fault.code for fault in result.frame.faults] == [NO_COPY] * 3
    assert sum(waits) == pytest.approx(RANK_TAKE_S if is_rank else 3 * TAKE_S)


def _setup(root: Path, sizes: Sequence[int], index: int, rank: int | None) -> StageSetup:
    """A rank of a ring of the dummy engine with one stage for each size."""
    stages = []
    for number, size in enumerate(sizes):
        peers = tuple(f"p{number}.{one}" for one in range(size))
        group = TensorGroup("ring", peers) if size > 1 else None
        stages.append(StagePlan(peers[0], "dummy", Shard("m", number, number + 1, len(sizes)), 0, group))
    plan = Plan("i", BALLOT, "m", "digest", tuple(stages), 512, PlanInputs((), "memory", 1), 2048)
    endpoints = tuple(f"127.0.0.1:{port + 1}" for port in range(sizes[index]))
    wiring = None if rank is None else RankWiring("ring", rank, endpoints)
    return StageSetup(plan, index, root, {}, 8, wiring, disk=DiskSetup(root, FileLimits(10**9, 1)))


def _place(setup: StageSetup) -> tuple[Path, str]:
    """The folder of a stage or rank, and the maker in its files."""
    store = disk_store(setup)
    assert store is not None
    store.close(DEADLINE_S)
    return store._folder.path, store._folder.maker


def test_every_rank_of_every_split_has_files_of_its_own(tmp_path: Path) -> None:
    whole = _setup(tmp_path, (1, 1), 0, None)
    halves = [_setup(tmp_path, (2, 1), 0, rank) for rank in range(2)]
    thirds = [_setup(tmp_path, (3, 1), 0, rank) for rank in range(3)]
    places = [_place(setup) for setup in (whole, *halves, *thirds)]
    assert len({path for path, _ in places}) == len({maker for _, maker in places}) == len(places)
    assert len({ring_of(setup) for setup in (whole, halves[0], thirds[0])}) == 3
    assert ring_of(halves[0]) == ring_of(halves[1])
    assert _place(_setup(tmp_path, (2, 1), 1, None)) == _place(_setup(tmp_path, (1, 1), 1, None))

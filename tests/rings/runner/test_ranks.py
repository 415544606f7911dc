"""What a tensor group is to its leader and to those that follow: one order of frames, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from exo_mesh.domain.frame import Frame
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.engine.contract import GroupCheck
from exo_mesh.errors import EngineError, RankLostError
from exo_mesh.rings.runner.group.environment import HOSTFILE, VARIABLES
from exo_mesh.rings.runner.group.ranks import RankFiles, RankLinks, frame_deadline_s, watch_leader
from exo_mesh.rings.runner.stage import Stage
from exo_mesh.wire import ring_link
from tests.rings.runner.test_stage_and_driver import TinyEngine
from tests.wire.test_ring_hop import BALLOT, Receiving, frame, hello


def check(all_reduce_s: float, chunk_s: float) -> GroupCheck:
    return GroupCheck(all_reduce_s, 1e9, chunk_s, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("all_reduce_s", "chunk_s", "expected"),
    [(25e-6, 0.0, 10.05), (25e-6, 0.5, 20.0), (8e-3, 0.5, 26.0), (8e-3, 60.0, 120.0)],
)
def test_a_frame_may_take_so_many_times_what_was_measured(all_reduce_s: float, chunk_s: float, expected: float) -> None:
    assert frame_deadline_s(check(all_reduce_s, chunk_s), 120.0) == pytest.approx(expected)


@contextlib.asynccontextmanager
async def group_of(followers: int) -> AsyncIterator[tuple[RankLinks, list[Receiving], asyncio.Task[None]]]:
    ranks = [Receiving() for _ in range(followers)]
    for rank in ranks:
        await rank.up()
    links = RankLinks(hello(), followers + 1, None)
    running = asyncio.create_task(links.run())
    try:
        yield links, ranks, running
    finally:
        running.cancel()
        await asyncio.wait([running])
        for rank in ranks:
            if rank.server is not None:
                await rank.down()


async def test_every_rank_gets_every_frame_in_order() -> None:
    async with group_of(2) as (links, ranks, _):
        links.link_to([f"127.0.0.1:{rank.port}" for rank in ranks])
        for step in range(1, 30):
            await links.hand_out(frame(step))
        for rank in ranks:
            await rank.until(lambda rank=rank: len(rank.frames) == 29)  # type: ignore[misc]
            assert [got.step for got in rank.frames] == list(range(1, 30))
        assert links.linked and len(links) == 2


async def test_a_frame_waits_for_a_hop_that_breaks_and_comes_back() -> None:
    async with group_of(1) as (links, (rank,), _):
        links.link_to([f"127.0.0.1:{rank.port}"])
        await links.hand_out(frame(1))
        await rank.down()
        while links.linked:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(links.hand_out(frame(2)))
        await asyncio.sleep(0.1)
        assert not waiting.done(), "computing now would block the loop that has to dial again"
        await rank.up()
        await waiting
        await rank.until(lambda: len(rank.frames) == 2)


async def test_a_rank_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_link, "LOST_AFTER_S", 0.5)
    async with group_of(2) as (links, ranks, running):
        links.link_to([f"127.0.0.1:{rank.port}" for rank in ranks])
        await links.hand_out(frame(1))
        await ranks[1].down()
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(asyncio.shield(running), 20)
        (error,) = caught.value.exceptions
        assert isinstance(error, RankLostError) and "rank 2 is lost: it at 127.0.0.1" in str(error)


async def test_a_leader_that_was_never_told_of_its_ranks_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("exo_mesh.rings.runner.group.ranks.HAND_OUT_S", 0.2)
    async with group_of(1) as (links, _, _running):
        with pytest.raises(RankLostError, match="rank 1 has taken no frame"):
            await links.hand_out(frame(1))


async def test_a_rank_whose_leader_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.rings.runner.group.ranks.LEADER_GONE_S", 0.5)
    async with group_of(1) as (links, (rank,), running):
        watch = asyncio.create_task(watch_leader(rank.receiver))
        links.link_to([f"127.0.0.1:{rank.port}"])
        await links.hand_out(frame(1))
        assert rank.receiver.num_streams == 1 and not watch.done()
        running.cancel()
        with pytest.raises(RankLostError, match="the leader of the tensor group"):
            await asyncio.wait_for(watch, 20)


async def test_a_rank_whose_leader_never_calls_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.rings.runner.group.ranks.FIRST_CALL_S", 0.2)
    with pytest.raises(RankLostError, match="the leader of the tensor group"):
        await asyncio.wait_for(watch_leader(Receiving().receiver), 20)


class FailingEngine(TinyEngine):
    def forward(self, stage_input: object) -> object:  # type: ignore[override]
        raise EngineError("out of memory")


@pytest.mark.parametrize("is_rank", [False, True])
def test_an_engine_that_fails_ends_a_group_and_else_only_the_rows(is_rank: bool) -> None:
    stage = Stage(FailingEngine(True, False), 0, is_rank=is_rank)
    with pytest.raises(EngineError, match="out of memory") if is_rank else contextlib.nullcontext():
        result = stage.process(Frame(BALLOT, 1, frame(1).rows, (1,)))
        assert [fault.sequence for fault in result.frame.faults] == [1]


def test_the_files_of_a_rank_are_there_until_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "left over")
    files = RankFiles()
    files.remove()  # before there are any
    files.write(RankWiring("ring", 1, ("127.0.0.1:9", "127.0.0.1:10")))
    hosts = Path(os.environ[HOSTFILE])
    assert hosts.is_file() and os.environ["MLX_RANK"] == "1"
    assert set(VARIABLES) & os.environ.keys() == {"MLX_RANK", HOSTFILE}
    files.remove()
    files.remove()
    assert not hosts.parent.exists()


def test_two_ranks_on_one_machine_share_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "left over")  # and taken back after the test
    folders, both = [], [RankFiles(), RankFiles()]
    for rank, files in enumerate(both):
        files.write(RankWiring("ring", rank, ("127.0.0.1:9", "127.0.0.1:10")))
        folders.append(Path(os.environ[HOSTFILE]).parent)
    assert folders[0] != folders[1] and [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * 2
    both[0].remove()
    assert [folder.exists() for folder in folders] == [False, True]
    both[1].remove()

"""Tensor groups as real runner processes on loopback, over MLX's ring collectives: what they compute, how they end.

None of them is quick: the collectives spin, so two ranks take both cores of a small machine, and every runner imports
mlx-lm first.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

pytest.importorskip("mlx_lm")

from exo_mesh.cli.bench.local_ring import LocalRunner, RingJob, free_endpoints, local_ring, spawn_runner
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.runner.reports import RunnerListening
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.errors import MeshError, RankLostError
from exo_mesh.rings.prefix_disk.folder import stored_files
from exo_mesh.rings.runner.group.ranks import LEADER_GONE_S
from exo_mesh.rings.runner.group.rendezvous import MEET_S
from exo_mesh.settings.values import MOST_CACHE_BYTES
from exo_mesh.wire.control_driver import DriverChannels
from exo_mesh.wire.ring_link import LOST_AFTER_S
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.group_rings import generate, greedy_alone, group_plan, prompts

pytestmark = pytest.mark.timeout(600)

LAYERS = 4
LONG = np.random.default_rng(3).integers(3, 256, 300).tolist()
"""A prompt that is long enough to be written to disk."""
SLACK_S = 10.0
IDLE_S = 65.0
MODELS = {"llama": TinyModel("llama", layers=LAYERS), "qwen3": TinyModel("qwen3", layers=LAYERS, seed=3)}


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), MODELS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), MODELS["llama"])


@pytest.fixture(autouse=True)
def files_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks keep files below TMPDIR, and other tests have ranks, too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def rank_files() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("exo-mesh-rank-*"))


@asynccontextmanager
async def group_ring(
    model_dir: Path, *sizes: int, disks: Path | None = None
) -> AsyncIterator[tuple[Plan, list[LocalRunner], DriverChannels]]:
    """Afterwards no process of it is left, and no file of a rank. disks: where its ranks write KV; None: it has no
    prefix cache."""
    plan, channels = group_plan(sizes, LAYERS), DriverChannels()
    cache_bytes = 0 if disks is None else MOST_CACHE_BYTES
    try:
        async with local_ring(plan, model_dir, {}, prefix_bytes=cache_bytes, disks=disks) as runners:
            pids = [member.process.pid for runner in runners for member in (runner, *runner.followers)]
            yield plan, runners, channels
    finally:
        await channels.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not rank_files()


@pytest.mark.extended
@pytest.mark.parametrize(
    "sizes", [pytest.param((2,), marks=pytest.mark.slow), (2, 1), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str
)
async def test_greedy_tokens_are_those_of_one_process(model_dir: Path, sizes: tuple[int, ...]) -> None:
    wanted = prompts(8)
    expected = greedy_alone(model_dir, LAYERS, wanted, 16)
    async with group_ring(model_dir, *sizes) as (plan, runners, channels):
        alone = await generate(channels, runners, plan, wanted[0], 16)
        together = await asyncio.gather(*(generate(channels, runners, plan, prompt, 16) for prompt in wanted))
    assert alone == expected[0]
    assert together == expected
    assert len({token for answer in expected for token in answer}) > 8, "nearly all tokens are the same"


@pytest.mark.slow
async def test_two_groups_in_one_ring(llama: Path) -> None:
    wanted = prompts(2)
    async with group_ring(llama, 2, 2) as (plan, runners, channels):
        got = await asyncio.gather(*(generate(channels, runners, plan, prompt, 8) for prompt in wanted))
    assert got == greedy_alone(llama, LAYERS, wanted, 8)


async def have_written(members: Sequence[LocalRunner]) -> None:
    """Returns once each rank has one file."""
    async with asyncio.timeout(60):
        while [(await one.fresh_beat()).prefix.disk_files for one in members] != [1] * len(members):
            pass


def file_of(disks: Path, rank: int) -> Path:
    (found,) = (one.path for one in stored_files(disks) if one.stage.endswith(f"rank-{rank}"))
    return found


@pytest.mark.extended
async def test_a_group_that_is_started_again_reads_the_files_of_all_its_ranks(llama: Path, tmp_path: Path) -> None:
    """The third time, rank 1 has the file of rank 0."""
    answers, hits, misses, disks = [], [], [], tmp_path / "kv"
    for start in range(3):
        if start == 2:
            file_of(disks, 1).write_bytes(file_of(disks, 0).read_bytes())
        async with group_ring(llama, 2, disks=disks) as (plan, runners, channels):
            answers.append(await generate(channels, runners, plan, LONG, 16))
            await have_written((runners[0], *runners[0].followers))
            figures = (await runners[0].fresh_beat()).prefix
            hits.append(figures.disk_hits)
            misses.append(figures.disk_misses)
    assert answers == [greedy_alone(llama, LAYERS, [LONG], 16)[0]] * 3
    assert hits == [0, 1, 1] and misses == [0, 0, 1], "a miss counts as a hit first"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_group_that_loses_a_rank_while_it_reads_a_file_ends_and_answers_when_started_again(
    llama: Path, tmp_path: Path, rank: int
) -> None:
    (cold,), disks = greedy_alone(llama, LAYERS, [LONG], 16), tmp_path / "kv"
    async with group_ring(llama, 2, disks=disks) as (plan, runners, channels):
        assert await generate(channels, runners, plan, LONG, 16) == cold
        await have_written((runners[0], *runners[0].followers))
    async with group_ring(llama, 2, disks=disks) as (plan, runners, channels):
        members = (runners[0], *runners[0].followers)
        await generate(channels, runners, plan, prompts(1)[0], 2)  # the files are listed
        freeze(members[1])  # the leader waits for its agreement
        running = asyncio.create_task(generate(channels, runners, plan, LONG, 16))
        async with asyncio.timeout(60):
            while not (await members[0].fresh_beat()).prefix.disk_hits:
                pass
        kill(members[rank])
        try:
            if rank == 1:
                assert members[0].ready is not None
                code = await failure_of(members[0], members[0].ready.loaded.group.deadline_s + LOST_AFTER_S + SLACK_S)
                assert code == RankLostError.code
        finally:
            await end(members[1])
        with pytest.raises(MeshError):
            await running
    async with group_ring(llama, 2, disks=disks) as (plan, runners, channels):
        assert await generate(channels, runners, plan, LONG, 16) == cold
        assert (await runners[0].fresh_beat()).prefix.disk_hits == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment_s", [0.0, 2.1])
async def test_a_rank_that_is_killed_around_a_write_costs_no_answer(
    llama: Path, tmp_path: Path, rank: int, moment_s: float
) -> None:
    (cold,), disks = greedy_alone(llama, LAYERS, [LONG], 16), tmp_path / "kv"
    async with group_ring(llama, 2, disks=disks) as (plan, runners, channels):
        members = (runners[0], *runners[0].followers)
        assert await generate(channels, runners, plan, LONG, 16) == cold
        await asyncio.sleep(moment_s)  # the moment is arbitrary, and nothing is measured
        kill(members[rank])
    async with group_ring(llama, 2, disks=disks) as (plan, runners, channels):
        members = (runners[0], *runners[0].followers)
        assert await generate(channels, runners, plan, LONG, 16) == cold
        await have_written(members)


@pytest.mark.extended
async def test_a_rank_listens_to_its_leader_alone_and_answers_no_request(llama: Path) -> None:
    (wanted,) = prompts(1)
    async with group_ring(llama, 2) as (plan, runners, channels):
        (leader,) = runners
        (follower,) = leader.followers
        listening = [
            connection.laddr.port
            for connection in psutil.Process(follower.process.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening == [follower.port], "nothing but the port for frames"
        with pytest.raises(MeshError, match="Method not found"):
            await generate(channels, [follower], plan, wanted, 8)
        assert await generate(channels, runners, plan, wanted, 8) == greedy_alone(llama, LAYERS, [wanted], 8)[0]


@pytest.mark.parametrize(
    "number", [pytest.param(6, marks=pytest.mark.extended), pytest.param(100, marks=pytest.mark.slow)]
)
async def test_every_rank_computed_every_frame_and_freed_it(llama: Path, number: int) -> None:
    """Of many requests, one after the other and mixed."""
    wanted = prompts(number)
    async with group_ring(llama, 2) as (plan, runners, channels):
        members = (runners[0], *runners[0].followers)
        first = [await generate(channels, runners, plan, prompt, 4) for prompt in wanted]
        rss = [psutil.Process(member.process.pid).memory_info().rss for member in members]
        again = await asyncio.gather(*(generate(channels, runners, plan, prompt, 4) for prompt in wanted))
        grown = [
            psutil.Process(member.process.pid).memory_info().rss - was for member, was in zip(members, rss, strict=True)
        ]
        beats = [await member.fresh_beat() for member in members]
    assert again == first == greedy_alone(llama, LAYERS, wanted, 4)
    assert beats[1].frames_in >= beats[0].laps > 9 and beats[0].linked
    assert [beat.sequences for beat in beats] == [0, 0]
    assert max(grown) < 64 * 2**20, "they took memory for good"


@pytest.mark.slow
async def test_a_group_that_was_idle_for_long_answers_at_once_and_has_not_grown(llama: Path) -> None:
    """Longer than the idle timeouts of sockets and of HTTP/2."""
    (wanted,) = prompts(1)
    async with group_ring(llama, 2) as (plan, runners, channels):
        members = (runners[0], *runners[0].followers)
        first = await generate(channels, runners, plan, wanted, 8)
        rss = [psutil.Process(member.process.pid).memory_info().rss for member in members]
        await asyncio.sleep(IDLE_S)
        again = await generate(channels, runners, plan, wanted, 8)
        grown = [
            psutil.Process(member.process.pid).memory_info().rss - was for member, was in zip(members, rss, strict=True)
        ]
    assert again == first == greedy_alone(llama, LAYERS, [wanted], 8)[0]
    assert max(grown) < 4 * 2**20


Harm = Callable[[LocalRunner], None]


def kill(runner: LocalRunner) -> None:
    runner.process.kill()


def freeze(runner: LocalRunner) -> None:
    runner.process.send_signal(signal.SIGSTOP)


async def end(runner: LocalRunner) -> None:
    if runner.process.returncode is None:
        runner.process.kill()
    await runner.process.wait()


async def failure_of(runner: LocalRunner, patience_s: float) -> str:
    """The code that a runner ended with, within its deadline."""
    async with asyncio.timeout(patience_s):
        await runner.process.wait()
        while runner.failed is None:  # its last words may still be in the pipe
            await asyncio.sleep(0.01)
    return runner.failed.code


MID_DECODE = pytest.param(True, id="mid-decode", marks=pytest.mark.extended)
IDLE = pytest.param(False, id="idle", marks=pytest.mark.slow)


@pytest.mark.parametrize("busy", [MID_DECODE, IDLE])
@pytest.mark.parametrize("harm", [kill, pytest.param(freeze, marks=pytest.mark.slow)])
async def test_without_a_rank_the_leader_ends_with_its_name(llama: Path, harm: Harm, busy: bool) -> None:
    async with group_ring(llama, 2) as (plan, runners, channels):
        (leader,) = runners
        (follower,) = leader.followers
        assert leader.ready is not None
        running = asyncio.create_task(generate(channels, runners, plan, prompts(1)[0], 400 if busy else 2))
        if busy:
            await leader.fresh_beat()
        else:
            await running
        harm(follower)
        try:
            code = await failure_of(leader, leader.ready.loaded.group.deadline_s + LOST_AFTER_S + SLACK_S)
        finally:
            await end(follower)
        assert code == RankLostError.code
        if busy:
            with pytest.raises(MeshError):
                await running


@pytest.mark.parametrize("busy", [MID_DECODE, IDLE])
@pytest.mark.parametrize("harm", [kill, pytest.param(freeze, marks=pytest.mark.slow)])
async def test_without_its_leader_a_rank_ends_by_itself(llama: Path, harm: Harm, busy: bool) -> None:
    async with group_ring(llama, 2) as (plan, runners, channels):
        (leader,) = runners
        (follower,) = leader.followers
        assert follower.ready is not None
        running = asyncio.create_task(generate(channels, runners, plan, prompts(1)[0], 400 if busy else 2))
        if busy:
            await leader.fresh_beat()
        else:
            await running
        harm(leader)
        try:
            code = await failure_of(follower, follower.ready.loaded.group.deadline_s + LEADER_GONE_S + SLACK_S)
        finally:
            await end(leader)
        assert code == RankLostError.code
        if busy:
            with pytest.raises(MeshError):
                await running


@pytest.mark.slow
@pytest.mark.parametrize("present", [0, 1], ids=["leader alone", "rank 1 alone"])
async def test_a_rank_that_never_comes_is_a_failure_with_a_name(llama: Path, present: int) -> None:
    plan = group_plan([2], LAYERS)
    wiring = RankWiring("ring", present, free_endpoints(2))
    runner = await spawn_runner(RingJob(plan, llama, {}, None, 0), 0, None, wiring)
    with pytest.raises(RankLostError, match="rank 1 of 2 did not connect" if present == 0 else "leader did not answer"):
        await runner.expect(RunnerListening)
    async with asyncio.timeout(MEET_S):
        assert await runner.process.wait() == 1
    runner.writer.close()
    await runner.writer.wait_closed()

"""What an owner does when a stage does not know its ballot any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from exo_mesh.domain.plan import Ballot, Plan, ReserveAnswer, StageStatus
from exo_mesh.domain.runner_limits import RunnerLimits
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.errors import DeadlineError, FetchError, StageLostError
from exo_mesh.rings.hosting.reservations import Reservations
from exo_mesh.rings.placing import ring_monitor
from exo_mesh.rings.placing.ring_monitor import RingMonitor, tell_nobody
from exo_mesh.wire.proto import control_pb2 as pb
from tests.rings.placing.test_ownership import an_instance
from tests.support.nodes import until

PLAN = an_instance(1, "x", "a", "b").plan


class Stage:
    """A member with real reservations and no process. Its streams can be broken."""

    def __init__(self, index: int) -> None:
        self.held = Reservations()
        self.held.reserve(PLAN, index, 10**9, 0.0)
        self.held.renew(PLAN.instance_id, PLAN.ballot, 0.0)
        self.runs = True
        self.broken = asyncio.Event()
        self.streams = 0
        self.quiet: list[bool] = []
        """How each stream was asked for."""
        self.num_open = 0

    async def look(self, instance_id: str, ballot: Ballot) -> str:
        return "" if self.runs and (instance_id, ballot) == (PLAN.instance_id, PLAN.ballot) else "it does not run"

    async def release(self, instance_id: str, ballot: Ballot) -> None:
        self.held.release(instance_id, ballot)

    async def status(self, instance_id: str, *, shows_hop: bool = False) -> StageStatus:
        return StageStatus(range(1), 0, linked=False)

    async def adopt(self, plan: Plan, index: int, adopted: Ballot) -> ReserveAnswer:
        return self.held.adopt(plan.instance_id, plan.ballot, adopted)

    async def commit(
        self,
        instance_id: str,
        ballot: Ballot,
        keep_kv_from: int | None = None,
        wiring: RankWiring | None = None,
        *,
        quiet: bool = False,
    ) -> AsyncIterator[pb.StageStatus]:
        if self.held.renew(instance_id, ballot, 0.0) is None:
            raise StageLostError(f"ballot {ballot} is not in force here")
        self.streams += 1
        self.quiet.append(quiet)
        self.num_open += 1
        try:
            yield pb.StageStatus(ready=pb.StageReady())
            await self.broken.wait()
        finally:
            self.num_open -= 1
        self.broken.clear()


class Ring:
    """Finds the stages, as Members does, and knows whether the ring is used, as RingUse does."""

    own_id = "x"

    def __init__(self) -> None:
        self.stages: dict[str, Stage] = {"a": Stage(0), "b": Stage(1)}
        self.other_owner = False
        self.alive = {"a", "b"}
        self.silent: set[str] = set()
        self.calm = False

    def is_calm(self, instance_id: str) -> bool:
        return self.calm

    def member(self, peer_id: str) -> Any:
        return self.stages[peer_id]

    async def release(self, instance_id: str, ballot: Ballot, peer_ids: Iterable[str]) -> None:
        for peer_id in peer_ids:
            await self.member(peer_id).release(instance_id, ballot)

    def is_alive(self, peer_id: str) -> bool:
        return peer_id in self.alive

    def unanswered_s(self, peer_id: str) -> float:
        return 0.5 if peer_id in self.silent else 0.0

    async def connects(self, address: str, timeout_s: float) -> bool:
        return True

    async def is_refused(self, address: str, timeout_s: float) -> bool:
        return False

    def addresses(self, endpoint: str, peer_id: str) -> list[str]:
        return [endpoint]

    def is_out_of_reach(self, peer_id: str) -> bool:
        return False

    def has_other_owner(self, plan: Plan, ballot: Ballot) -> bool:
        return self.other_owner

    def break_stream(self, peer_id: str) -> None:
        self.stages[peer_id].broken.set()

    def ballots(self) -> list[Ballot]:
        return [stage.held.leases[0].ballot for stage in self.stages.values()]


@pytest.fixture
async def ring() -> Ring:
    return Ring()


@pytest.fixture
async def monitor(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RingMonitor]:
    monkeypatch.setattr(ring_monitor, "REATTACH_S", 0.5)
    monkeypatch.setattr(ring_monitor, "REATTACH_PAUSE_S", 0.01)
    members: Any = ring
    monitor = RingMonitor(PLAN, members, members, tell_nobody, RunnerLimits())
    monitor.watch()
    await until(lambda: all(stage.streams == 1 for stage in ring.stages.values()))
    yield monitor
    await monitor.close()


async def quiet(ring: Ring, monitor: RingMonitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ring be calm for long enough."""
    monkeypatch.setattr(ring_monitor, "QUIET_AFTER_S", 0.05)
    monkeypatch.setattr(ring_monitor, "CALM_JUDGE_EVERY_S", 0.02)
    ring.calm = True
    await until(lambda: all(stage.quiet == [False, True] for stage in ring.stages.values()))


async def test_reports_of_a_calm_ring_are_read_quietly_until_it_is_used(
    ring: Ring, monitor: RingMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await quiet(ring, monitor, monkeypatch)
    ring.calm = False
    await until(lambda: all(stage.quiet == [False, True, False] for stage in ring.stages.values()))
    await until(lambda: [stage.num_open for stage in ring.stages.values()] == [1, 1])
    assert not monitor.lost.done() and not monitor._broken


async def test_reports_are_read_over_many_pings_while_a_node_does_not_answer(
    ring: Ring, monitor: RingMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await quiet(ring, monitor, monkeypatch)
    ring.silent.add("b")
    await until(lambda: all(stage.quiet[-1] is False for stage in ring.stages.values()))
    ring.silent.clear()
    await until(lambda: all(stage.quiet[-1] is True for stage in ring.stages.values()))
    assert not monitor.lost.done()


async def test_a_stage_of_a_calm_ring_that_is_gone_is_lost(
    ring: Ring, monitor: RingMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await quiet(ring, monitor, monkeypatch)
    ring.stages["b"].runs = False
    ring.stages["b"].held.adopt(PLAN.instance_id, PLAN.ballot, Ballot(7, "a"))
    ring.break_stream("b")
    assert "not in force" in str(await monitor.lost)


async def test_a_stage_that_goes_while_its_reports_change_their_connection_is_lost(
    ring: Ring, monitor: RingMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await quiet(ring, monitor, monkeypatch)
    ring.stages["b"].runs = False
    ring.stages["b"].held.release(PLAN.instance_id, PLAN.ballot)
    ring.calm = False
    assert "not in force" in str(await monitor.lost)


async def test_a_calm_ring_that_is_no_longer_watched_has_no_stream(
    ring: Ring, monitor: RingMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await quiet(ring, monitor, monkeypatch)
    await monitor.close()
    assert [stage.num_open for stage in ring.stages.values()] == [0, 0]


async def test_a_ring_adopted_in_part_is_taken_back_whole(ring: Ring, monitor: RingMonitor) -> None:
    ring.stages["a"].held.adopt(PLAN.instance_id, PLAN.ballot, Ballot(7, "a"))
    ring.break_stream("a")
    await until(lambda: ring.stages["a"].streams == 2)
    assert await monitor.lost_or_taken_back() is None
    assert monitor.ballot.proposer == "x" and monitor.ballot > Ballot(7, "a")
    assert ring.ballots() == [monitor.ballot] * 2, "both stages are fenced against the adopter"
    assert ring.stages["b"].streams == 1 and not monitor.lost.done(), "a stream that is well is left alone"


async def test_nothing_is_promised_for_a_ring_of_which_a_stage_is_gone(ring: Ring, monitor: RingMonitor) -> None:
    ring.stages["b"].runs = False
    ring.stages["a"].held.adopt(PLAN.instance_id, PLAN.ballot, Ballot(7, "a"))
    ring.break_stream("a")
    assert "not in force" in str(await monitor.lost)
    assert ring.ballots() == [Ballot(7, "a"), PLAN.ballot]


async def test_a_ring_that_has_another_owner_is_left_to_that_one(ring: Ring, monitor: RingMonitor) -> None:
    ring.other_owner = True
    for stage in ring.stages.values():
        stage.held.adopt(PLAN.instance_id, PLAN.ballot, Ballot(7, "a"))
    ring.break_stream("a")
    assert "has been adopted" in str(await monitor.lost), "unless the owned_rings hands over before"
    assert ring.ballots() == [Ballot(7, "a")] * 2


async def test_a_ring_that_was_adopted_whole_is_not_taken_back_before_its_record_is_here(
    ring: Ring, monitor: RingMonitor
) -> None:
    """The cut between the two has healed, and news travels more slowly than a question."""
    for stage in ring.stages.values():
        stage.held.adopt(PLAN.instance_id, PLAN.ballot, Ballot(7, "a"))
    ring.break_stream("b")
    assert "has been adopted by peer a" in str(await monitor.lost)
    assert ring.ballots() == [Ballot(7, "a")] * 2


async def test_a_ring_whose_adopter_has_died_is_taken_back(ring: Ring, monitor: RingMonitor) -> None:
    ring.alive.remove("a")
    for stage in ring.stages.values():
        stage.held.adopt(PLAN.instance_id, PLAN.ballot, Ballot(7, "a"))
    ring.break_stream("b")
    await until(lambda: ring.stages["b"].streams == 2)
    assert ring.ballots() == [monitor.ballot] * 2 and monitor.ballot > Ballot(7, "a")


async def test_a_ring_that_ends_for_good_ends_at_a_stage_that_is_promised_to_a_failed_adopter(
    ring: Ring, monitor: RingMonitor
) -> None:
    ring.stages["a"].held.adopt(PLAN.instance_id, PLAN.ballot, Ballot(7, "a"))
    await monitor.release(for_good=True)
    assert not any(stage.held.leases for stage in ring.stages.values())


async def test_a_ring_that_gives_way_leaves_what_an_adopter_has(ring: Ring, monitor: RingMonitor) -> None:
    ring.stages["a"].held.adopt(PLAN.instance_id, PLAN.ballot, Ballot(7, "a"))
    await monitor.release()
    assert ring.stages["a"].held.leases and not ring.stages["b"].held.leases


class FetchingStage(Stage):
    """Reports these statuses after one another, and then nothing."""

    def __init__(self, index: int, *script: pb.StageStatus) -> None:
        super().__init__(index)
        self.script = script

    async def commit(
        self,
        instance_id: str,
        ballot: Ballot,
        keep_kv_from: int | None = None,
        wiring: RankWiring | None = None,
        *,
        quiet: bool = False,
    ) -> AsyncIterator[pb.StageStatus]:
        for status in self.script:
            yield status
        await asyncio.Event().wait()


def fetching(done: int, total: int) -> pb.StageStatus:
    return pb.StageStatus(fetching=pb.StageFetching(done=done, total=total))


async def test_a_ring_is_being_fetched_until_each_stage_has_its_files(ring: Ring) -> None:
    told: list[tuple[str, int, int]] = []
    loading = pb.StageStatus(loading=pb.StageLoading(done=1, total=4))
    ring.stages["a"] = FetchingStage(0, fetching(5, 10), fetching(10, 10), loading)
    ring.stages["b"] = FetchingStage(1, loading)
    members: Any = ring
    monitor = RingMonitor(PLAN, members, members, lambda *progress: told.append(progress), RunnerLimits())
    monitor.watch()
    await until(lambda: ("loading", 2, 8) in told)
    assert [one for one in told if one[0] == "fetching"] == [("fetching", 5, 10), ("fetching", 10, 10)]
    await monitor.close()


async def test_a_fetch_that_fails_says_what_to_do(ring: Ring) -> None:
    failed = pb.StageFailed(code="fetch_failed", message="no room", remedy="make room", final=True)
    ring.stages["b"] = FetchingStage(1, fetching(0, 10), pb.StageStatus(failed=failed))
    members: Any = ring
    monitor = RingMonitor(PLAN, members, members, tell_nobody, RunnerLimits())
    with pytest.raises(FetchError, match="no room") as caught:
        await monitor.bring_up()
    assert (caught.value.remedy, caught.value.is_final) == ("make room", True)
    assert monitor.lost_seat is not None and monitor.lost_seat.peer_id == "b"
    await monitor.close()


async def test_whoever_waits_has_patience_as_long_as_bytes_come(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = asyncio.get_running_loop().time
    limits = RunnerLimits(load_base_s=0.0)
    monkeypatch.setattr(ring_monitor, "MARGIN_S", 0.05)
    monkeypatch.setattr(ring_monitor, "FETCH_SILENCE_S", 0.2)
    ring.stages["a"] = FetchingStage(0, fetching(5, 10))
    members: Any = ring
    monitor = RingMonitor(PLAN, members, members, tell_nobody, limits)
    began = clock()
    with pytest.raises(DeadlineError):
        await monitor.bring_up()
    assert clock() - began >= 0.2, "not after the time in which it should have been loaded"
    await monitor.close()

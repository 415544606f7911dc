"""Positions that sequences hold together count once, and a ring that counts so never holds more than its pool."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

from exo_mesh.domain.footprint import ENGINE_OVERHEAD_BYTES
from exo_mesh.domain.frame import Copy, Remove, StageReport
from exo_mesh.engine.contract import ANY_POSITION, LEAST_SHARED, MOST_PARTS, Capabilities
from exo_mesh.engine.shared_positions import SharedPositions
from exo_mesh.rings.runner.scheduling.kv_budget import KvBudget
from tests.rings.runner.prefix.random_ring import CachingRing
from tests.rings.runner.prefix.test_prefix_ring import KeepingEngine
from tests.rings.runner.test_stage_and_driver import Caller, expected, ids

POOL = 4000
SYSTEM = [(7 * place) % 10 for place in range(1000)]
"""Small ids: the engine's float32 is exact for sums of ids below 16,000."""
BYTES = 10


def test_a_shared_beginning_counts_once_until_its_last_holder_ends() -> None:
    shared = SharedPositions(256)
    for sequence in range(2, 34):
        shared.note(Copy(sequence, 1, 1000, 2000))
    assert shared.saved == 32 * 1000
    shared.note(Remove(1))
    assert shared.saved == 31 * 1000
    for sequence in range(2, 33):
        shared.note(Remove(sequence))
    assert shared.saved == 0
    shared.note(Remove(33))
    assert len(shared) == shared.saved == 0


def test_short_beginnings_and_copies_of_some_stages_share_nothing() -> None:
    shared = SharedPositions(256)
    shared.note(Copy(2, 1, 255, 2000))
    shared.note(Copy(3, 1, 1000, 2000, first_stage=1))
    assert shared.saved == len(shared) == 0
    nothing = SharedPositions(0)
    nothing.note(Copy(2, 1, 1000, 2000))
    assert nothing.saved == len(nothing) == 0


def test_a_part_is_cut_where_a_copy_of_fewer_positions_ends() -> None:
    shared = SharedPositions(256)
    shared.copy(1, 2, 1000)
    shared.copy(2, 3, 400)
    assert shared.saved == 1000 + 400
    shared.copy(1, 4, 1000)
    assert shared.saved == 1000 + 400 + 1000
    shared.remove(1)
    shared.remove(2)
    assert shared.saved == 400, "3 and 4 hold the first 400 positions together"
    shared.remove(3)
    assert shared.saved == 0


def test_a_chain_of_copies_has_a_bounded_number_of_parts() -> None:
    shared = SharedPositions(256)
    for sequence in range(1, MOST_PARTS + 3):
        shared.copy(sequence, sequence + 1, 300 * sequence)
    parts = [min(sequence, MOST_PARTS) for sequence in range(1, MOST_PARTS + 3)]
    assert shared.saved == 300 * sum(parts)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_counted_is_the_union_of_what_sequences_hold(seed: int) -> None:
    """Against sets of memory cells."""
    rng, shared = random.Random(seed), SharedPositions(LEAST_SHARED)
    cells: dict[int, list[tuple[int, int]]] = {}
    for new in range(1, 80):
        if cells and rng.random() < 0.7:
            source = rng.choice(list(cells))
            upto = rng.randint(1, len(cells[source]))
            before = shared.saved
            shared.copy(source, new, upto)
            common = shared.saved - before
            assert common <= upto
            assert common == 0 or common >= LEAST_SHARED
            cells[new] = [*cells[source][:common], *((new, place) for place in range(common, rng.randint(upto, 3000)))]
        else:
            cells[new] = [(new, place) for place in range(rng.randint(1, 3000))]
        if rng.random() < 0.6:
            gone = rng.choice(list(cells))
            del cells[gone]
            shared.remove(gone)
        union = {cell for held in cells.values() for cell in held}
        assert sum(map(len, cells.values())) - shared.saved == len(union)


class SharingEngine(KeepingEngine):
    """Takes BYTES for each position in memory; copies share the beginning, if `shares`."""

    capabilities = Capabilities(ragged=True, rollback=ANY_POSITION, dtypes=("float32",), shares_from=LEAST_SHARED)

    def __init__(self, is_first: bool, is_last: bool) -> None:
        super().__init__(is_first, is_last)
        self.shared = SharedPositions(LEAST_SHARED)

    def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        super().copy(source, sequence, upto, max_tokens)
        self.shared.remove(sequence)
        self.shared.copy(source, sequence, upto)

    def remove(self, sequence: int) -> None:
        super().remove(sequence)
        self.shared.remove(sequence)

    @property
    def positions(self) -> int:
        return sum(map(len, self.kv.values())) - self.shared.saved

    def memory_bytes(self) -> int:
        return BYTES * self.positions


class BudgetRing(CachingRing):
    """A ring whose stages report what they can hold. most: positions that a stage has held at most, beside a lone
    sequence; running: sequences at the same time."""

    def __init__(self, *kinds: type[KeepingEngine]) -> None:
        self.kinds = kinds
        self.budgets: list[KvBudget] = []
        self.most = self.running = 0
        super().__init__(
            len(kinds), lambda index, count: kinds[index](index == 0, index == count - 1),
            max_tokens=POOL, max_running=64, max_waiting=100,
        )  # fmt: skip
        self.budgets = [self._budget(index) for index in range(len(kinds))]

    def _budget(self, index: int) -> KvBudget:
        return KvBudget(self.engines[index], ENGINE_OVERHEAD_BYTES + BYTES * POOL, POOL)

    def lap(self) -> None:
        frame, logits, hidden = self.sent.popleft(), None, None
        for index, stage in enumerate(self.stages):
            result = stage.process(frame)
            budget = self.budgets[index]
            budget.computed(frame)
            report = StageReport(
                0.001, 0.0, 0, budget.tokens, shares_from=budget.shared.least, shared_tokens=budget.shared_tokens
            )
            frame, logits, hidden = result.frame, result.logits, result.hidden
            frame = frame.changed(reports=(*frame.reports, report))
        running = list(self.driver._scheduler.running)
        self.running = max(self.running, sum(one.decoding for one in running))
        if len(running) > 1:
            self.most = max(self.most, *(engine.memory_bytes() // BYTES for engine in self.engines))
        self.driver.returned(frame, logits, hidden)
        self.driver.callers.deliver()

    def lose(self, lost: int) -> None:
        super().lose(lost)
        kept_from = lost + 1
        for index in range(len(self.stages)):
            if index == lost:
                self.budgets[index] = self._budget(index)
                continue
            self.budgets[index].plan(ENGINE_OVERHEAD_BYTES + BYTES * POOL, POOL)
            if index < kept_from:
                self.budgets[index].forget()


class CopyingEngine(SharingEngine):
    """Its copies take memory of their own."""

    capabilities = Capabilities(ragged=True, rollback=ANY_POSITION, dtypes=("float32",))

    def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        KeepingEngine.copy(self, source, sequence, upto, max_tokens)


async def ask_all(ring: BudgetRing, prompts: Sequence[list[int]], tokens: int) -> None:
    callers: list[Caller] = []
    for number, prompt in enumerate(prompts):
        callers.append(ring.submit(f"r{number}", prompt, tokens))
    ring.run()
    for prompt, caller in zip(prompts, callers, strict=True):
        assert ids(await caller.collect()) == expected(prompt, tokens, len(ring.stages))


@pytest.mark.parametrize(
    ("kinds", "least", "most"),
    [
        ((SharingEngine,), 32, 32),
        ((SharingEngine, SharingEngine), 32, 32),
        ((SharingEngine, CopyingEngine), 2, 3),
        ((CopyingEngine,), 2, 3),
    ],
)
async def test_requests_with_one_system_prompt_run_together_where_all_stages_share(
    kinds: tuple[type[KeepingEngine], ...], least: int, most: int
) -> None:
    """The pool holds three of them one by one."""
    ring = BudgetRing(*kinds)
    await ask_all(ring, [[*SYSTEM, number, *[3] * 19] for number in range(32)], 12)
    assert least <= ring.running <= most
    assert ring.most <= POOL


async def run_schedule(seed: int) -> None:
    """Random requests over three system prompts, with cancels and lost stages."""
    rng = random.Random(seed)
    ring = BudgetRing(*[SharingEngine] * rng.choice([1, 2, 3]))
    systems = [[rng.randrange(6) for _ in range(rng.choice([300, 700, 1500]))] for _ in range(3)]
    asked: dict[str, tuple[list[int], int, Caller]] = {}
    for number in range(40):
        name = f"r{number}"
        prompt = [*rng.choice(systems), *(rng.randrange(6) for _ in range(rng.choice([3, 40, 400])))]
        tokens = rng.choice([1, 5, 60])
        asked[name] = prompt, tokens, ring.submit(name, prompt, tokens)
        for _ in range(rng.choice([0, 1, 30])):
            if ring.sent:
                ring.lap()
        if rng.random() < 0.1:
            name = rng.choice(list(asked))
            ring.driver.cancel(name, asked.pop(name)[2].mailbox)
        if rng.random() < 0.05:
            ring.lose(rng.randrange(len(ring.stages)))
    ring.run()
    assert ring.most <= POOL
    for prompt, tokens, caller in asked.values():
        assert ids(await caller.collect()) == expected(prompt, tokens, len(ring.stages))
    ring.driver._scheduler.pressure = 2
    ring.driver.pump()
    ring.run()
    for engine in ring.engines:
        assert isinstance(engine, SharingEngine)
        assert engine.positions == len(engine.shared) == 0, "every position is counted back"
    counted = [budget.shared for budget in ring.budgets]
    assert all(len(shared) == shared.saved == 0 for shared in (*counted, ring.driver._scheduler.shared))


@pytest.mark.parametrize("seed", range(4))
async def test_random_requests_never_take_more_than_the_pool(seed: int) -> None:
    await run_schedule(seed)


@pytest.mark.extended
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))])
async def test_many_random_requests_never_take_more_than_the_pool(part: int) -> None:
    first = int(os.environ.get("EXO_MESH_TEST_SEED", "1000")) + 100 * part
    for seed in range(first, first + 10):
        await run_schedule(seed)

"""Thousands of requests with random prefixes: memory stays flat, and every shared position is counted back.

EXO_MESH_TEST_REQUESTS sets how many (10,000): pytest -m slow -s tests/soak/test_shared_prefixes_flat.py
"""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import psutil
import pytest
from exo_mesh_dummy.engine import KV_BYTES, DummyStage

from exo_mesh.domain.footprint import ENGINE_OVERHEAD_BYTES
from exo_mesh.domain.frame import StageReport
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageEngine
from exo_mesh.rings.runner.scheduling.kv_budget import KvBudget
from tests.rings.runner.prefix.random_ring import CachingRing
from tests.rings.runner.test_stage_and_driver import Caller

REQUESTS = int(os.environ.get("EXO_MESH_TEST_REQUESTS", "10000"))
POOL = 20_000
ALLOWANCE_BYTES = 8 * 2**20
"""Growth of the process between a quarter of the requests and all: allocators keep a few pages."""


class DummyRing(CachingRing):
    """Stages of the dummy engine that report what they can hold."""

    def __init__(self, directory: Path, num_stages: int = 2) -> None:
        def make(index: int, count: int) -> StageEngine:
            stage = DummyStage()
            stage.load(LoadRequest(Shard("model", index, index + 1, count), directory, 4096), lambda done, total: None)
            return stage

        super().__init__(num_stages, make, max_tokens=POOL, max_running=32, max_waiting=100)
        reserved = ENGINE_OVERHEAD_BYTES + KV_BYTES * POOL
        self.budgets = [KvBudget(engine, reserved, POOL) for engine in self.engines]
        self.most = 0

    def lap(self) -> None:
        frame, logits = self.sent.popleft(), None
        for stage, budget in zip(self.stages, self.budgets, strict=True):
            result = stage.process(frame)
            budget.computed(frame)
            report = StageReport(
                0.001, 0.0, 0, budget.tokens, shares_from=budget.shared.least, shared_tokens=budget.shared_tokens
            )
            frame, logits = result.frame.changed(reports=(*result.frame.reports, report)), result.logits
        self.most = max(self.most, *(engine.memory_bytes() // KV_BYTES for engine in self.engines))
        self.driver.returned(frame, logits)
        self.driver.callers.deliver()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_is_flat_over_random_prefixes_and_every_block_is_counted_back(tmp_path: Path) -> None:
    rng, ring, process = random.Random(1), DummyRing(tmp_path), psutil.Process()
    systems = [[rng.randrange(256) for _ in range(rng.choice([300, 1000, 2000]))] for _ in range(20)]
    callers: list[Caller] = []
    sizes: dict[int, int] = {}
    for number in range(REQUESTS):
        base = rng.choice(systems)
        prompt = [
            *base[: rng.randrange(64, len(base) + 1)],
            *(rng.randrange(256) for _ in range(rng.randrange(1, 300))),
        ]
        callers.append(ring.submit(f"r{number}", prompt, rng.choice([1, 8, 40])))
        if rng.random() < 0.05:
            ring.driver.cancel(f"r{number}", callers.pop().mailbox)
        if number % 50 == 49:
            ring.run()
            assert not ring.driver._live, "every request has ended"
            callers.clear()
        if number + 1 in (REQUESTS // 4, REQUESTS):
            gc.collect()
            sizes[number + 1] = process.memory_info().rss
    ring.run()
    first, last = sizes.values()
    print(f"{REQUESTS} requests: {first / 1e6:.1f} MB, then {last / 1e6:.1f} MB; {ring.cache.hits} hits; "
          f"at most {ring.most} of {POOL} positions")  # fmt: skip
    assert last - first < ALLOWANCE_BYTES
    assert ring.most <= POOL
    ring.driver._scheduler.pressure = 2
    ring.driver.pump()
    ring.run()
    assert [engine.memory_bytes() for engine in ring.engines] == [0, 0]
    shared = [*(budget.shared for budget in ring.budgets), ring.driver._scheduler.shared]
    assert all(one.saved == len(one) == 0 for one in shared)
    assert ring.cache.tokens == len(ring.cache._indexes) == 0

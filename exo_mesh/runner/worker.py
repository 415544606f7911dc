"""Runs frames, requests and cancels one after the other: the only user of the engine."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from exo_mesh.domain.frame import Frame
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.request import GenerateRequest
from exo_mesh.engine.contract import LoadProgress, LoadRequest, StageEngine
from exo_mesh.engine.registry import provider
from exo_mesh.runner.driver import Driver
from exo_mesh.runner.mailbox import Mailbox
from exo_mesh.runner.scheduler import Limits
from exo_mesh.runner.stage import Stage

KV_POOL_TOKENS = 8192
"""Positions that running sequences may hold together even where the context limit is shorter."""


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerateRequest
    mailbox: Mailbox


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


Item = Frame | Submit | Cancel


@dataclass(frozen=True, slots=True)
class StageSetup:
    """What a worker needs to know of the plan it is a part of."""

    plan: Plan
    index: int
    model_dir: Path
    options: dict[str, str]
    max_queued: int

    @property
    def num_stages(self) -> int:
        return len(self.plan.stages)

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1


class Worker:
    """Owns engine, stage and (at the last stage) driver.

    Computes on the event loop's own thread: a frame then costs one thread switch less than with a compute thread beside
    it, which is more than all of its Python. While a frame is computed the loop stands still; gRPC's own threads go on
    sending and receiving, and heartbeats come from another thread (`pulse`).

    `inbox` is bounded by what may be on its way: frames in flight, queued requests and one cancel for each.
    `progress` rises with each item done, and during a load: a watchdog outside the process looks at it.
    """

    def __init__(self, setup: StageSetup) -> None:
        self._setup = setup
        self._outbox: deque[Frame] = deque()
        self.inbox: asyncio.Queue[Item] = asyncio.Queue()
        self.progress = 0
        self.busy_s = 0.0
        self.engine: StageEngine | None = None
        self.driver: Driver | None = None

    def load(self, progress: LoadProgress) -> int:
        """Make the engine and load the shard; answers the bytes it takes. Blocks. Raises MeshErrors."""

        def counted(done: int, total: int) -> None:
            self.progress += 1
            progress(done, total)

        plan = self._setup.plan
        stage = plan.stages[self._setup.index]
        engine = provider(stage.engine).create()
        engine.load(LoadRequest(stage.shard, self._setup.model_dir, plan.context_limit, self._setup.options), counted)
        if self._setup.is_last:
            self.driver = Driver(plan.ballot, self._limits(), self._outbox.append)
        self.engine = engine
        return engine.memory_bytes()

    async def run(self, send: Callable[[Frame], Awaitable[None]]) -> None:
        """Work until a Shutdown op has come round, or until cancelled. `send` takes a frame to the next stage."""
        assert self.engine is not None, "load first"
        stage = Stage(self.engine, self._setup.index)
        to_self = self._setup.num_stages == 1
        running = True
        while running:
            running = self._do(await self.inbox.get(), stage)
            self.progress += 1
            while self._outbox:
                frame = self._outbox.popleft()
                if to_self:
                    self.inbox.put_nowait(frame)
                    await asyncio.sleep(0)  # nothing else would let other tasks run in a ring of one
                else:
                    await send(frame)

    def _do(self, item: Item, stage: Stage) -> bool:
        match item:
            case Frame():
                return self._frame(item, stage)
            case Submit() if self.driver is not None:
                self.driver.submit(item.request, item.mailbox)
            case Cancel() if self.driver is not None:
                self.driver.cancel(item.request_id)
        return True

    def _frame(self, frame: Frame, stage: Stage) -> bool:
        start = time.perf_counter()
        result = stage.process(frame)
        self.busy_s += time.perf_counter() - start
        if self.driver is not None:
            self.driver.returned(result.frame, result.logits)
        else:
            self._outbox.append(result.frame)
        return not result.shutdown

    def _limits(self) -> Limits:
        return Limits(
            max_in_flight=self._setup.num_stages,
            max_waiting=self._setup.max_queued,
            max_tokens=max(KV_POOL_TOKENS, self._setup.plan.context_limit),
        )

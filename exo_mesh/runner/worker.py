"""The compute thread: loads the engine, then runs frames, requests and cancels one after the other."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
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

_log = logging.getLogger(__name__)

KV_POOL_TOKENS = 8192
"""Positions that running sequences may hold together even where the context limit is shorter."""


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerateRequest
    mailbox: Mailbox


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End after what is in the inbox before it."""


Item = Frame | Submit | Cancel | Stop


@dataclass(frozen=True, slots=True)
class StageSetup:
    """What a worker needs to know of the plan it is a part of."""

    plan: Plan
    index: int
    model_dir: Path
    options: dict[str, str]
    max_queued: int

    @property
    def is_last(self) -> bool:
        return self.index == len(self.plan.stages) - 1


class Worker:
    """Owns engine, stage and (at the last stage) driver. `inbox` is how other threads reach it; the rest is its own.

    The inbox is bounded by what may be on its way: frames in flight, queued requests and one cancel for each.
    `progress` rises with each item done, and during a load: a watchdog outside the process looks at it.
    """

    def __init__(self, setup: StageSetup, send: Callable[[Frame], None]) -> None:
        self._setup = setup
        self._send = send
        self.inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.progress = 0
        self.busy_s = 0.0
        self.engine: StageEngine | None = None
        self.driver: Driver | None = None

    def load(self, progress: LoadProgress) -> int:
        """Make the engine and load the shard; answers the bytes it takes. Raises MeshErrors."""

        def counted(done: int, total: int) -> None:
            self.progress += 1
            progress(done, total)

        plan = self._setup.plan
        stage = plan.stages[self._setup.index]
        engine = provider(stage.engine).create()
        engine.load(LoadRequest(stage.shard, self._setup.model_dir, plan.context_limit, self._setup.options), counted)
        if self._setup.is_last:
            self.driver = Driver(plan.ballot, self._limits(), self._send_from_driver)
        self.engine = engine
        return engine.memory_bytes()

    def run(self) -> None:
        """Work until Stop or a Shutdown op."""
        assert self.engine is not None, "load first"
        stage = Stage(self.engine, self._setup.index)
        try:
            while self._do(self.inbox.get(), stage):
                self.progress += 1
        finally:
            self.engine.close()

    def _do(self, item: Item, stage: Stage) -> bool:
        match item:
            case Frame():
                return self._frame(item, stage)
            case Submit() if self.driver is not None:
                self.driver.submit(item.request, item.mailbox)
            case Cancel() if self.driver is not None:
                self.driver.cancel(item.request_id)
            case Stop():
                return False
        return True

    def _frame(self, frame: Frame, stage: Stage) -> bool:
        start = time.perf_counter()
        result = stage.process(frame)
        self.busy_s += time.perf_counter() - start
        if self.driver is not None:
            self.driver.returned(result.frame, result.logits)
        else:
            self._send(result.frame)
        return not result.shutdown

    def _send_from_driver(self, frame: Frame) -> None:
        """To stage 0: over the ring, or back to ourselves in a ring of one."""
        if len(self._setup.plan.stages) == 1:
            self.inbox.put(frame)
        else:
            self._send(frame)

    def _limits(self) -> Limits:
        return Limits(
            max_in_flight=len(self._setup.plan.stages),
            max_waiting=self._setup.max_queued,
            max_tokens=max(KV_POOL_TOKENS, self._setup.plan.context_limit),
        )

"""A ring on a made-up clock: stages that take the time a formula says, under the real scheduler and its real pace."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from exo_mesh.domain.frame import Row
from exo_mesh.rings.runner.drafting.acceptance import Acceptance
from exo_mesh.rings.runner.drafting.drafts import Drafts
from exo_mesh.rings.runner.drafting.foresight import Foresight
from exo_mesh.rings.runner.scheduling.limits import SchedulerLimits
from exo_mesh.rings.runner.scheduling.pace import Pace
from exo_mesh.rings.runner.scheduling.scheduler import Scheduler
from exo_mesh.rings.runner.scheduling.sequence import Sequence as Request
from exo_mesh.rings.runner.scheduling.sequence import Work

Cost = Callable[[Work], float]
"""Seconds that a stage computes for a frame."""


@dataclass
class _Guesses:
    """What the drafts of a request read of its generation."""

    request: SimpleNamespace
    sequence: Request
    foresight: Foresight
    index: int = 0
    may_draft: bool = True
    constraint: None = None


class _Chance:
    """Right, which is 0, at a share of all positions. See DraftSource."""

    def __init__(self, seed: int, right: float) -> None:
        self._seed = seed
        self._right = right

    def draft(self, tokens: Sequence[int], ahead: Sequence[int], most: int) -> tuple[list[int], int]:
        first = len(tokens) + len(ahead)
        return [
            int(random.Random(1_000_003 * self._seed + at).random() >= self._right) for at in range(first, first + most)
        ], 0


@dataclass
class _Travel:
    work: Work
    sent: float
    compute: list[float] = field(default_factory=list)
    waited: float = 0.0


class RingModel:
    """Requests of `prompt` tokens that draw `output` tokens; one that ends is followed by the next of `requests`."""

    def __init__(self, stages: Sequence[Cost], hop_s: float, pace: Pace | None = None, **limits: float) -> None:
        self.stages = stages
        self.hop_s = hop_s
        self.now = 0.0
        self.busy = [0.0] * len(stages)
        self.pace = pace or Pace(len(stages))
        self.scheduler = Scheduler(SchedulerLimits(len(stages), **limits), self.pace)  # type: ignore[arg-type]
        self.drawn: dict[int, list[float]] = {}
        self.live: dict[int, tuple[Request, int]] = {}
        self._free_at = [0.0] * len(stages)
        self._events: list[tuple[float, int, int, _Travel]] = []
        self._order = itertools.count()

    def submit(self, request: Request, output: int) -> None:
        assert self.scheduler.submit(request)
        self.live[request.id] = request, output
        self.drawn[request.id] = []
        self._pump()

    def run(self, until: float = float("inf"), arrivals: Sequence[tuple[float, Request, int]] = ()) -> None:
        """Until nothing is on its way, or a time has come. arrivals: (when, request, tokens to draw), in order."""
        coming = deque(arrivals)
        while self._events or coming:
            if coming and (not self._events or coming[0][0] <= self._events[0][0]):
                self.now, request, output = coming.popleft()
                self.submit(request, output)
                continue
            if self._events[0][0] > until:
                self.now = until
                return
            self.now, _, stage, travel = heapq.heappop(self._events)
            self._arrive(stage, travel)

    def _arrive(self, stage: int, travel: _Travel) -> None:
        if stage == len(self.stages):
            self._came_round(travel)
            return
        start = max(self.now, self._free_at[stage])
        seconds = self.stages[stage](travel.work)
        travel.waited += start - self.now
        travel.compute.append(seconds)
        self.busy[stage] += seconds
        self._free_at[stage] = start + seconds
        hop_s = 0.0 if stage == len(self.stages) - 1 else self.hop_s
        self._push(self._free_at[stage] + hop_s, stage + 1, travel)

    def _came_round(self, travel: _Travel) -> None:
        work, lap_s = travel.work, self.now - travel.sent
        stale = self.scheduler.came_round(work)
        if work.is_prefill:
            self.pace.prefilled(len(work.token_ids), lap_s, travel.waited, travel.compute)
        else:
            self.drafted(work)
            if len(work.token_ids) > len(work.rows):
                self.pace.drafted(len(work.rows), len(work.token_ids), travel.compute)
            else:
                self.pace.decoded(len(work.rows), lap_s, travel.compute, travel.waited)
            for row in work.rows:
                if row.sequence not in stale and row.sequence in self.live:
                    self._judge(row)
        self._pump()

    def _judge(self, row: Row) -> None:
        """Every drawn token is 0."""
        request, output = self.live[row.sequence]
        refusals = request.refusals
        for _ in range(row.num_logits):
            self.drawn[request.id].append(self.now)
            if len(self.drawn[request.id]) == output:
                self.scheduler.remove(request.id)
                del self.live[request.id]
                return
            self.drew(request)
            self.scheduler.token_drawn(request, 0)
            if request.refusals > refusals:
                return

    def drafted(self, work: Work) -> None:
        """A decode frame is back."""

    def drew(self, request: Request) -> None:
        """A token is about to become output."""

    def _pump(self) -> None:
        list(self.scheduler.admit())
        while (work := self.scheduler.next_work()) is not None:
            # the first stage is a hop away from the driver, which is the last one
            self._push(self.now + self.hop_s * (len(self.stages) > 1), 0, _Travel(work, self.now))

    def _push(self, when: float, stage: int, travel: _Travel) -> None:
        heapq.heappush(self._events, (when, next(self._order), stage, travel))


class DraftingModel(RingModel):
    """Requests that draft, and whose guesses are right by chance."""

    def __init__(self, stages: Sequence[Cost], hop_s: float, right: float) -> None:
        super().__init__(stages, hop_s)
        self._right = right
        self.guesses: dict[int, _Guesses] = {}
        self.drafts = Drafts(self.guesses, self.pace, lambda _: None)  # type: ignore[arg-type]
        self._before = 0
        self.drafts.cuts_back = self.drafts.num_ids = 2**31
        self.scheduler.drafter = self.drafts

    def submit(self, request: Request, output: int) -> None:
        source = _Chance(request.id, self._right)
        foresight = Foresight(source, Acceptance(self.drafts.acceptance), self.drafts.tally)
        asked = SimpleNamespace(max_tokens=output, request_id="")
        self.guesses[request.id] = _Guesses(asked, request, foresight)
        super().submit(request, output)

    def drew(self, request: Request) -> None:
        guesses = self.guesses[request.id]
        self.drafts.came(guesses, [0])  # type: ignore[arg-type]
        guesses.index += 1

    def drafted(self, work: Work) -> None:
        tokens = sum(map(len, self.drawn.values()))
        self.drafts.came_round(work, self.now, len(self.live), tokens - self._before)
        self._before = tokens

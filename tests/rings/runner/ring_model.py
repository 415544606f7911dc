"""A ring on a made-up clock: stages that take the time a formula says, under the real scheduler and its real pace."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from exo_mesh.rings.runner.scheduling.pace import Pace
from exo_mesh.rings.runner.scheduling.scheduler import Scheduler, SchedulerLimits
from exo_mesh.rings.runner.scheduling.sequence import Sequence as Request
from exo_mesh.rings.runner.scheduling.sequence import Work

Cost = Callable[[Work], float]
"""Seconds that a stage computes for a frame."""


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
        self.scheduler.came_round(work)
        if work.is_prefill:
            self.pace.prefilled(len(work.token_ids), lap_s, travel.waited, travel.compute)
        else:
            self.pace.decoded(len(work.rows), lap_s, travel.compute, travel.waited)
            for row in work.rows:
                request, output = self.live[row.sequence]
                self.drawn[request.id].append(self.now)
                if len(self.drawn[request.id]) == output:
                    self.scheduler.remove(request.id)
                    del self.live[request.id]
                else:
                    self.scheduler.token_drawn(request, 0)
        self._pump()

    def _pump(self) -> None:
        list(self.scheduler.admit())
        while (work := self.scheduler.next_work()) is not None:
            # the first stage is a hop away from the driver, which is the last one
            self._push(self.now + self.hop_s * (len(self.stages) > 1), 0, _Travel(work, self.now))

    def _push(self, when: float, stage: int, travel: _Travel) -> None:
        heapq.heappush(self._events, (when, next(self._order), stage, travel))

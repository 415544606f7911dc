"""The real driver over real stages of any engine, in one thread: what happens between two frames is the test's choice.

Each stage has an inbox, as in a ring of processes. `step` lets one stage do one frame, so that several frames are on
their way, at different stages, when a request comes, goes or is cancelled.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import numpy as np

from exo_mesh.domain.frame import Copy, Frame, Insert, Remove, StageReport
from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.request import GenerateRequest, SamplingParams
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageEngine
from exo_mesh.rings.runner.calls import events_message
from exo_mesh.rings.runner.drafting.sources import SourceMaker
from exo_mesh.rings.runner.driver import Driver
from exo_mesh.rings.runner.generation import Generation
from exo_mesh.rings.runner.mailbox import CallerUpdate, Mailbox
from exo_mesh.rings.runner.prefix.cache import PrefixCache
from exo_mesh.rings.runner.scheduling.limits import SchedulerLimits
from exo_mesh.rings.runner.stage import Stage
from exo_mesh.wire.proto import driver_pb2 as pb

BALLOT = Ballot(1, "test")

Tokens = tuple[int, ...]


class Answers(Mailbox):
    """What the caller of one request is told. `backlog` is what the driver believes is unread.
    first: the index of the first token that is to come."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.messages: list[pb.GenerateEvents] = []
        self.num_read = 0

    @property
    def backlog(self) -> int:
        return len(self.messages) - self.num_read

    def post(self, update: CallerUpdate) -> None:
        assert not self.ended, "a request ends once"
        self.messages.append(events_message([update]))

    @property
    def events(self) -> list[pb.TokenEvent]:
        return [event for message in self.messages for event in message.events]

    @property
    def tokens(self) -> list[int]:
        expected = list(range(self.first, self.first + len(self.events)))
        assert [event.index for event in self.events] == expected, "none lost, none doubled"
        return [event.token_id for event in self.events]

    @property
    def error(self) -> str:
        return self.messages[-1].error_code if self.messages else ""

    @property
    def ended(self) -> bool:
        return bool(self.error) or any(event.finish for event in self.events[-1:])


@dataclass
class Asked:
    """A request on a ServingRing, what came of it, and the float32 `[vocab]` logits of each of its tokens."""

    request: GenerateRequest
    answers: Answers
    logits: list[np.ndarray] = field(default_factory=list)


class ServingRing:
    """All stages and the driver. computing_s: what each stage reports that a frame took; None: nothing is reported, and
    the driver learns nothing. prefix: the driver's prefix cache; without one, stages keep nothing."""

    def __init__(
        self,
        engines: Sequence[StageEngine],
        *,
        computing_s: Sequence[float] | None = None,
        prefix: PrefixCache | None = None,
        make_source: SourceMaker | None = None,
        **limits: float,
    ) -> None:
        self.engines = engines
        self.pressure = 0
        self.pressure_of: dict[int, int] = {}
        """By stage, where its machine is shorter of memory than `pressure` says."""
        self.asked: dict[str, Asked] = {}
        self.frames: list[Frame] = []
        """Every frame that was sent, as it was sent."""
        self._computing_s = computing_s
        self._kept_tokens = 0 if prefix is None else 2**31
        self._stages = [Stage(engine, index) for index, engine in enumerate(engines)]
        self._inboxes: list[deque[Frame]] = [deque() for _ in engines]
        self.limits = SchedulerLimits(len(engines), **limits)  # type: ignore[arg-type]
        self.driver = Driver(BALLOT, self.limits, self._sent, prefix=prefix, make_source=make_source)
        self._draw_one = self.driver.outputs._draw_one
        self.driver.outputs._draw_one = self._note  # type: ignore[method-assign]
        self._ballot = BALLOT

    def submit(self, prompt: Tokens, tokens: int, **fields: object) -> Asked:
        """A greedy request that nothing ends before `tokens` have come."""
        name = f"r{len(self.asked)}"
        request = GenerateRequest(name, prompt, tokens, SamplingParams(temperature=0), **fields)  # type: ignore[arg-type]
        asked = self.asked[name] = Asked(request, Answers(len(request.resume_ids)))
        self.driver.submit(request, asked.answers)
        self.driver.callers.deliver()
        return asked

    def cancel(self, asked: Asked) -> None:
        self.driver.cancel(asked.request.request_id, asked.answers)
        self.driver.callers.deliver()

    def read(self, asked: Asked) -> None:
        """The caller catches up with what it has been told."""
        asked.answers.num_read = len(asked.answers.messages)
        if asked.answers.parked:
            self.driver.unpark(asked.request.request_id, asked.answers)

    def step(self, stage: int) -> bool:
        """Let one stage do the next frame in its inbox; False if there is none."""
        if not self._inboxes[stage]:
            return False
        frame = self._inboxes[stage].popleft()
        result = self._stages[stage].process(frame)
        frame = result.frame
        if self._computing_s is not None:
            declared = self.engines[stage].capabilities
            pressure = max(self.pressure, self.pressure_of.get(stage, 0))
            report = StageReport(
                self._computing_s[stage],
                0.0,
                pressure,
                kept_tokens=self._kept_tokens,
                cuts_anywhere=declared.cuts_anywhere,
                cut_tokens=declared.rollback,
                cuts_at_rows=declared.cuts_at_rows,
            )
            frame = frame.changed(reports=(*frame.reports, report))
        if stage < len(self._stages) - 1:
            self._inboxes[stage + 1].append(frame)
            return True
        self.driver.returned(frame, result.logits)
        self.driver.callers.deliver()
        return True

    def turn(self) -> bool:
        """Let each stage do its next frame, as they would at the same time; False if there was none."""
        return sum([self.step(stage) for stage in reversed(range(len(self._stages)))]) > 0

    def lose(self, stage: int) -> None:
        """Replace a stage by an empty one, with all frames lost that are on their way. The stages behind it keep what
        they hold, if all can cut KV back; the others begin empty."""
        num_stages = len(self.engines)
        cuts_back = all(engine.capabilities.cuts_anywhere for engine in self.engines)
        kept_from = stage + 1 if cuts_back else num_stages
        for index, engine in enumerate(self.engines[:kept_from]):
            self._stages[index] = Stage(engine, index)
            self._stages[index].forget(list(engine.sequences()))
        for inbox in self._inboxes:
            inbox.clear()
        self._ballot = Ballot(self._ballot.counter + 1, self._ballot.proposer)
        self.driver.change(self._ballot, self.limits, kept_from)
        self.driver.callers.deliver()

    def run(self) -> None:
        """Until nothing is on its way."""
        while self.turn():
            pass

    @property
    def num_in_flight(self) -> int:
        return sum(map(len, self._inboxes))

    def leftovers(self) -> dict[str, int]:
        """What is still held for requests, by where; all zero after the last one has ended."""
        driver, scheduler = self.driver, self.driver._scheduler
        return {
            "sequences on stages": sum(len(engine.sequences()) for engine in self.engines),
            "frames": self.num_in_flight + len(driver._in_flight) + len(driver.laps._sent),
            "generations": len(driver._live) + len(driver._by_request) + driver._num_traced,
            "scheduled": scheduler.num_running + scheduler.num_waiting + scheduler.num_parked,
            "positions": scheduler.num_held,
            "frames counted": len(scheduler._decodes) + scheduler._prefills,
            "clients": len(scheduler._queue._active),
            "ops": len(driver._ops),
            "inserted, not removed": sum(
                isinstance(op, Insert | Copy) - isinstance(op, Remove) for frame in self.frames for op in frame.ops
            ),
        }

    def _sent(self, frame: Frame) -> None:
        self.frames.append(frame)
        self._inboxes[0].append(frame)

    def _note(self, generation: Generation, logits: np.ndarray) -> None:
        """Keep the logits from which the driver draws a token."""
        self.asked[generation.request.request_id].logits.append(logits.copy())
        self._draw_one(generation, logits)


def load_stages(
    engine: str, model_dir: Path, cuts: Sequence[int], options: dict[str, str] | None = None
) -> list[StageEngine]:
    """One stage per layer range. Options as `--engine-option` gives them."""
    config = json.loads((model_dir / "config.json").read_bytes())
    num_layers = int(config.get("text_config", config)["num_hidden_layers"])
    stages: list[StageEngine] = []
    for start, stop in zip([0, *cuts], [*cuts, num_layers], strict=True):
        stage: StageEngine = import_module(f"exo_mesh_{engine}").provider.create()
        shard = Shard("model", start, stop, num_layers)
        stage.load(LoadRequest(shard, model_dir, 4096, options or {}), lambda done, total: None)
        stages.append(stage)
    return stages

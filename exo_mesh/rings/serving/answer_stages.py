"""Remembers which stages computed each answer, and which took over from which token on. Names and numbers only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from exo_mesh.domain.plan import Ballot
from exo_mesh.domain.view import InstanceInfo

MAX_KEPT = 512
"""Ended requests that are remembered: a kilobyte each."""

MAX_LEGS = 32
"""Most legs of one request; of more, the first and the last ones are kept."""


class AnswerStage(msgspec.Struct, frozen=True):
    """A stage of a ring. peers, names: all of a tensor group. layers: [start, stop). process: new after a restart."""

    peers: tuple[str, ...]
    names: tuple[str, ...]
    engine: str
    layers: tuple[int, int]
    process: str


class AnswerLeg(msgspec.Struct):
    """The part of an answer that one ring computed under one ballot.

    from_token: tokens of the answer before this part. stages: empty until the shared view shows the plan. pause_s: from
    the last token before to the first one of this part; None before that, and for the first part.
    """

    instance_id: str
    ballot: Ballot
    from_token: int
    stages: tuple[AnswerStage, ...] = ()
    pause_s: float | None = None


def stages_of(instance: InstanceInfo, name_of: Callable[[str], str]) -> tuple[AnswerStage, ...]:
    """The stages of an instance in ring order."""
    processes = instance.endpoints or ("",) * len(instance.plan.stages)
    return tuple(
        AnswerStage(
            stage.peers,
            tuple(map(name_of, stage.peers)),
            stage.engine,
            (stage.shard.start, stage.shard.stop),
            process,
        )
        for stage, process in zip(instance.plan.stages, processes, strict=True)
    )


class AnswerLegs:
    """The legs of one request, oldest first."""

    def __init__(self) -> None:
        self._legs: list[AnswerLeg] = []
        self.awaits_token = False
        """Whether the newest leg has sent no token yet."""

    def begin(self, leg: AnswerLeg) -> None:
        """Add a leg, unless it is the newest one already."""
        if self._legs and (self._legs[-1].instance_id, self._legs[-1].ballot) == (leg.instance_id, leg.ballot):
            return
        self._legs.append(leg)
        self.awaits_token = True
        if len(self._legs) > MAX_LEGS:
            del self._legs[MAX_LEGS // 2]

    def came(self, pause_s: float | None) -> None:
        """Note the first token of the newest leg."""
        self.awaits_token = False
        if len(self._legs) > 1:
            self._legs[-1].pause_s = pause_s

    def complete(self, find: Callable[[AnswerLeg], tuple[AnswerStage, ...]]) -> None:
        """Look up the stages of legs whose plan was not in the view when they began."""
        for leg in self._legs:
            leg.stages = leg.stages or find(leg)

    def describe(self) -> list[dict[str, Any]]:
        """The legs whose stages are known and differ from those before. `is_new` of a stage: this process has begun to
        hold its layers since the leg before."""
        shown: list[dict[str, Any]] = []
        before: tuple[AnswerStage, ...] = ()
        for leg in self._legs:
            if not leg.stages or leg.stages == before:
                continue
            kept, before = (before or leg.stages), leg.stages
            shown.append(
                {
                    "instance": leg.instance_id,
                    "from_token": leg.from_token,
                    "pause_s": None if leg.pause_s is None else round(leg.pause_s, 3),
                    "stages": [_describe_stage(stage, is_new=stage not in kept) for stage in leg.stages],
                }
            )
        return shown


def _describe_stage(stage: AnswerStage, *, is_new: bool) -> dict[str, Any]:
    return {
        "peers": list(stage.peers),
        "names": list(stage.names),
        "engine": stage.engine,
        "layers": list(stage.layers),
        "is_new": is_new,
    }


class AnsweredRequest(msgspec.Struct, frozen=True):
    """A request whose legs are remembered. key_id: of the API key that it came with; empty without one."""

    request_id: str
    model: str
    key_id: str
    legs: AnswerLegs


class AnsweredRequests:
    """The last MAX_KEPT ended requests, by each id that a client saw."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, AnsweredRequest] = OrderedDict()

    def add(self, answered: AnsweredRequest, names: Iterable[str]) -> None:
        """Remember a request. names: its other ids."""
        for name in {answered.request_id, *names} - {""}:
            self._found[name] = answered
            self._found.move_to_end(name)
        while len(self._found) > 3 * MAX_KEPT:
            self._found.popitem(last=False)

    def find(self, request_id: str) -> AnsweredRequest | None:
        """The request with this id."""
        return self._found.get(request_id)

"""Decides whether a stage may be tried on this node, from the fate of earlier runners."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from exo_mesh.base.clock import Clock
from exo_mesh.domain.footprint import ENGINE_OVERHEAD_BYTES, gigabytes
from exo_mesh.domain.health import HealthLevel, Reason
from exo_mesh.domain.plan import Plan
from exo_mesh.errors import CrashLoopError, QuarantinedError, ReservationError, with_remedy
from exo_mesh.rings.hosting.breaker import Breaker
from exo_mesh.rings.hosting.quarantine import Quarantine, flags_of
from exo_mesh.rings.hosting.runner_exit import End

WORKED_FRAMES = 100
"""Frames after which a stage counts as having worked: a prompt and some dozens of tokens, as of the last heartbeat."""

OOM_SHRINKS = 0.8
"""The part of its memory for weights and KV that a stage may have the next time, after it ran out of memory."""

OOM_S = 600.0
"""Seconds that this limit lasts; a quarantine lasts as long."""

MAX_SHRUNK = 256

_log = logging.getLogger(__name__)


class _Shrunk(msgspec.Struct, frozen=True):
    """A model that took more memory here than there was."""

    model: str
    most_bytes: int
    until: float


class Guard:
    """Counts crashes and stalls; a runner that got stuck before it worked goes into quarantine at once."""

    def __init__(self, own_id: str, quarantine: Quarantine, options: Mapping[str, str], clock: Clock) -> None:
        self._own_id = own_id
        self._quarantine = quarantine
        self._flags = flags_of(options)
        self._clock = clock
        self._breaker = Breaker()
        self._shrunk: dict[tuple[str, str], _Shrunk] = {}

    def check(self, plan: Plan, index: int) -> None:
        """Raises ReservationError, with the code of the reason, if this stage must not be tried here now."""
        engine = plan.stages[index].engine
        if (case := self._quarantine.find(plan.model_digest, engine, self._flags)) is not None:
            raise ReservationError(with_remedy(str(case), case.remedy), peer_id=self._own_id, why=QuarantinedError.code)
        if (loop := self._breaker.loop((plan.model_digest, engine), self._clock())) is not None:
            raise ReservationError(str(loop), peer_id=self._own_id, why=CrashLoopError.code)

    def ended(self, plan: Plan, index: int, end: End, cause: str, frames: int = 0) -> None:
        """Record how a runner of a stage ended, after `frames` frames. A runner that had worked does not count as part
        of a crash loop: a request that kills it is given up after a few rings, and a kill from outside is not its
        fault. But a runner that took more memory than there was will do so again, so its next plan gets less here."""
        engine = plan.stages[index].engine
        if end is End.OOM:
            self._shrink(plan, index, cause)
        elif frames >= WORKED_FRAMES and end is not End.WEDGED:
            return
        if end is End.WEDGED:
            self._quarantine.put(plan.model, plan.model_digest, engine, self._flags, cause)
        elif end in (End.CRASHED, End.STALLED, End.OOM) and self._breaker.crashed(
            (plan.model_digest, engine), plan.model, cause, self._clock()
        ):
            _log.warning("%s with %s keeps crashing: this node refuses it for a while: %s", plan.model, engine, cause)

    def most_bytes(self, plan: Plan, index: int) -> int | None:
        """The most that a stage of this model may reserve here after one ran out of memory; None if there is no
        limit."""
        shrunk = self._shrunk.get((plan.model_digest, plan.stages[index].engine))
        return shrunk.most_bytes if shrunk is not None and self._clock() < shrunk.until else None

    def _shrink(self, plan: Plan, index: int, cause: str) -> None:
        stage = plan.stages[index]
        fixed = min(ENGINE_OVERHEAD_BYTES, stage.reserve_bytes)
        most = fixed + int(OOM_SHRINKS * (stage.reserve_bytes - fixed))
        key = plan.model_digest, stage.engine
        self._shrunk.pop(key, None)
        self._shrunk[key] = _Shrunk(plan.model, most, self._clock() + OOM_S)
        while len(self._shrunk) > MAX_SHRUNK:
            del self._shrunk[next(iter(self._shrunk))]
        _log.warning("%s may take at most %s on this node for %.0f s: %s", plan.model, gigabytes(most), OOM_S, cause)

    def lift(self) -> int:
        """Forget the quarantine and the crashes; returns how many models and engines may be tried again."""
        lifted = self._quarantine.lift() + len(self._breaker.loops(self._clock()))
        self._breaker = Breaker()
        self._shrunk.clear()
        return lifted

    def reasons(self) -> list[Reason]:
        """The models that this node refuses now, with reasons for people."""
        loops = [
            Reason(
                CrashLoopError.code,
                HealthLevel.DEGRADED,
                str(loop),
                "the node's log has the lines before each crash, GET /v1/diagnostics/node the last phases; another "
                f"engine may work (--model-engine {loop.model}=NAME)",
            )
            for loop in self._breaker.loops(self._clock())
        ]
        cases = [
            Reason(QuarantinedError.code, HealthLevel.DEGRADED, str(case), case.remedy)
            for case in self._quarantine.cases
        ]
        shrunk = [
            Reason(
                "oom",
                HealthLevel.DEGRADED,
                f"a runner of {one.model} ran out of memory; the model may take at most {gigabytes(one.most_bytes)} "
                f"here for another {one.until - self._clock():.0f} s",
                "end other programs, or ask for a shorter context (--context-limit)",
            )
            for one in self._shrunk.values()
            if self._clock() < one.until
        ]
        return [*cases, *loops, *shrunk]

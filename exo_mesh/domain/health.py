"""One thing that is wrong with a peer or an instance, in words that say what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

MAX_REASONS = 16
"""That one peer tells the others of itself."""

MAX_TEXT = 400


class HealthLevel(StrEnum):
    """ok: nothing is wrong, though something may be worth knowing. degraded: it works, but not as well as it could, or
    not for everything. failed: it does not."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"


_ORDER = {HealthLevel.OK: 0, HealthLevel.DEGRADED: 1, HealthLevel.FAILED: 2}


@dataclass(frozen=True, slots=True)
class Reason:
    """code: a stable word. message: what is the case, with the numbers. remedy: what the reader can do."""

    code: str
    level: HealthLevel
    message: str
    remedy: str = ""

    def describe(self) -> dict[str, str]:
        return {"code": self.code, "level": str(self.level), "message": self.message, "remedy": self.remedy}


def worst(reasons: Iterable[Reason]) -> HealthLevel:
    """The level of whatever has these reasons."""
    return max((reason.level for reason in reasons), key=_ORDER.__getitem__, default=HealthLevel.OK)

"""One problem of a peer or an instance, with the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import msgspec

from exo_mesh.domain.fields import Cut, Else

MAX_REASONS = 16
"""Most reasons that one peer reports about itself."""

MAX_TEXT = 400


class HealthLevel(StrEnum):
    """How healthy something is. ok: nothing is wrong, though a reason may inform. degraded: it works, but slower or not
    for everything. failed: it does not work."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"


_ORDER = {HealthLevel.OK: 0, HealthLevel.DEGRADED: 1, HealthLevel.FAILED: 2}


class Reason(msgspec.Struct, frozen=True):
    """One problem. code: a stable word. message: the problem, with the numbers. remedy: the reader's next step."""

    code: Annotated[str, Cut(64)]
    level: Annotated[HealthLevel, Else(HealthLevel.DEGRADED)]
    message: Annotated[str, Cut(MAX_TEXT)]
    remedy: Annotated[str, Cut(MAX_TEXT)] = ""


def worst(reasons: Iterable[Reason]) -> HealthLevel:
    """The worst level among the reasons; OK if there are none."""
    return max((reason.level for reason in reasons), key=_ORDER.__getitem__, default=HealthLevel.OK)

"""The memory of all stages together, from their reports on a frame, and when a lone sequence must end for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from exo_mesh.domain.frame import StageReport

NO_LIMIT = 2**62
"""More positions than any stage has."""

LONE_FRAMES, LONE_S = 16, 3.0
"""A sequence that is alone on the ring while a machine is critically short of memory ends after LONE_FRAMES frames and
LONE_S seconds: two readings of that machine's memory must have confirmed it."""


def shares_from(reports: Iterable[StageReport]) -> int:
    """The least positions that sequences share at every stage; 0 if some stage does not share."""
    least = [report.shares_from for report in reports]
    return max(least) if min(least) else 0


def most_pressed(reports: Iterable[StageReport]) -> tuple[int, int]:
    """The highest memory pressure of all stages, and the first stage with it."""
    level, stage = -1, 0
    for index, report in enumerate(reports):
        if report.pressure > level:
            level, stage = report.pressure, index
    return level, stage


def room(reports: Iterable[StageReport], *, is_shared: bool) -> tuple[int, int]:
    """Positions that the stage with the least memory can hold, and how many more its sequences may grow by. is_shared:
    shared ones count once."""
    least = least_grown = NO_LIMIT
    for report in reports:
        held = report.kv_tokens - report.shared_tokens if is_shared else report.kv_tokens
        least = min(least, held)
        least_grown = min(least_grown, held + report.slack_tokens)
    return least, least_grown - least


class LoneTime(msgspec.Struct):
    """How long the only sequence on a ring has been alone while memory was critically short on a machine."""

    _frames: int = 0
    _since: float = 0.0

    def is_over(self, *, is_lone: bool, now: float) -> bool:
        """Note a frame that came round; returns whether the sequence must end. After that the count begins again. now:
        seconds of any one clock."""
        if not is_lone:
            self._frames = 0
            return False
        if not self._frames:
            self._since = now
        self._frames += 1
        if self._frames < LONE_FRAMES or now - self._since < LONE_S:
            return False
        self._frames = 0
        return True

"""What the reports of all stages on a frame say about their memory together. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from exo_mesh.domain.frame import StageReport

NO_LIMIT = 2**62
"""More positions than any stage has."""


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

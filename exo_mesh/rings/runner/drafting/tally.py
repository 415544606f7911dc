"""Counts what became of drafts, by their position in a run of drafts. Pure."""

from __future__ import annotations

from bisect import bisect_left

from exo_mesh.domain.runner.heartbeat import DRAFT_POSITIONS


class DraftTally:
    """Drafts that became output (accepted), and those that did not (rejected). By position: the first draft behind a
    drawn token is 1, and so on until one is refused or none is on its way."""

    def __init__(self) -> None:
        self.accepted = [0] * (len(DRAFT_POSITIONS) + 1)
        self.rejected = [0] * (len(DRAFT_POSITIONS) + 1)

    def accept(self, position: int) -> None:
        self.accepted[bisect_left(DRAFT_POSITIONS, position)] += 1

    def refuse(self, position: int, count: int) -> None:
        """Count `count` drafts from this position on as refused."""
        for at in range(position, position + count):
            self.rejected[bisect_left(DRAFT_POSITIONS, at)] += 1

"""Tracks whether the output is in a thought, and which tokens must come next if the thought has used up its budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from exo_mesh.domain.request import ThinkingBudget


class ThoughtLimit:
    """The thinking budget of one request. A function of the output alone, so that a resumed request continues alike."""

    def __init__(self, budget: ThinkingBudget, output_ids: Iterable[int]) -> None:
        self._budget = budget
        self._recent: deque[int] = deque(maxlen=max(len(budget.end_ids), len(budget.start_ids)))
        self._thinks = not budget.start_ids
        self._left = budget.tokens
        for token_id in output_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Record the next token of the output."""
        self._recent.append(token_id)
        if self._ends_with(self._budget.end_ids):
            self._thinks = False
        elif self._thinks:
            self._left -= 1
        elif self._budget.start_ids and self._ends_with(self._budget.start_ids):
            self._thinks = True

    def forced(self) -> tuple[int, ...]:
        """The missing tokens of the end marker; empty unless a thought has used up its budget."""
        if not self._thinks or self._left > 0:
            return ()
        end = self._budget.end_ids
        begun = next((n for n in range(len(end) - 1, 0, -1) if self._ends_with(end[:n])), 0)
        return end[begun:]

    def _ends_with(self, ids: tuple[int, ...]) -> bool:
        recent = list(self._recent)[-len(ids) :]
        return recent == list(ids)

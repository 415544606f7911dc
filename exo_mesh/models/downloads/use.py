"""Which models are at work here: instances use them, or fetches bring them."""

from __future__ import annotations

import asyncio
from collections import Counter
from weakref import WeakValueDictionary

from exo_mesh.membership.service import Membership


class ModelUse:
    """Models that instances of the mesh use, models that this node fetches, and one turn at a time with each model."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._fetches: Counter[str] = Counter()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def used(self) -> set[str]:
        """Models that an instance of the mesh uses."""
        return {instance.plan.model for _, instance in self._membership.view.records_of_instances()}

    def is_idle(self, model: str) -> bool:
        """Whether no instance uses the model and nothing fetches it."""
        return model not in self.used and not self._fetches[model]

    def begin_fetch(self, model: str) -> None:
        self._fetches[model] += 1

    def end_fetch(self, model: str) -> None:
        self._fetches[model] -= 1
        self._fetches += Counter()  # drops what is zero

    def turn(self, model: str) -> asyncio.Lock:
        """Held while the files of a model are changed."""
        return self._turns.setdefault(model, asyncio.Lock())

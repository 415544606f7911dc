"""Tracks which models are in use here: by instances, or by fetches."""

from __future__ import annotations

import asyncio
from collections import Counter
from weakref import WeakValueDictionary

from exo_mesh.mesh.membership.service import Membership


class ModelUse:
    """Tracks models that instances of the mesh use and models that this node fetches; serialises changes per model."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._fetches: Counter[str] = Counter()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def used(self) -> set[str]:
        """Models that an instance of the mesh uses."""
        return {instance.plan.model for _, instance in self._membership.view.records_of_instances()}

    def is_idle(self, model: str) -> bool:
        """Whether no instance uses the model and no fetch runs for it."""
        return model not in self.used and not self._fetches[model]

    def begin_fetch(self, model: str) -> None:
        self._fetches[model] += 1

    def end_fetch(self, model: str) -> None:
        self._fetches[model] -= 1
        self._fetches += Counter()  # drops zero counts

    def turn(self, model: str) -> asyncio.Lock:
        """Returns the lock that is held while files of a model change."""
        return self._turns.setdefault(model, asyncio.Lock())

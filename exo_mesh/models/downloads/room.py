"""The disk space of fetched models on this machine, and which of them are deleted to stay within it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from exo_mesh.domain.footprint import gigabytes
from exo_mesh.domain.on_disk import StagedCopy, surplus
from exo_mesh.errors import FetchError
from exo_mesh.machine.disk import Disk
from exo_mesh.models.downloads.records import DownloadRecords
from exo_mesh.models.downloads.rules import FetchRules
from exo_mesh.models.downloads.use import ModelUse
from exo_mesh.models.local_files import FetchedModel, LocalFiles
from exo_mesh.models.mesh_store import MeshStore

TOUCH_EVERY_S = 600.0
"""Precision of the time at which a model was last used."""

_log = logging.getLogger(__name__)


class ModelRoom:
    """Deletes models: to make room for others, and staged copies that nothing uses."""

    def __init__(
        self,
        files: LocalFiles,
        disk: Disk,
        rules: FetchRules,
        store: MeshStore,
        use: ModelUse,
        records: DownloadRecords,
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        """on_change: publishes which models are here now."""
        self._files = files
        self._disk = disk
        self._rules = rules
        self._store = store
        self.use = use
        self._records = records
        self._on_change = on_change
        self._evictable_bytes = 0
        self._swept: object = None

    @property
    def num_bytes(self) -> int:
        """Bytes that could be fetched now, deletable models included; 0 if this node fetches nothing."""
        if not self._rules.fetches:
            return 0
        return self._free_bytes + self._evictable_bytes

    @property
    def _free_bytes(self) -> int:
        return max(0, self._disk.free_bytes - self._disk.floor_bytes)

    async def refresh(self) -> None:
        """Updates the use of models, deletes staged copies, and computes how much could be deleted."""
        await self.sweep()
        models = await asyncio.to_thread(self._files.fetched)
        used = self.use.used
        for one in models:
            if one.name in used and time.time() - one.used_at > TOUCH_EVERY_S:
                await asyncio.to_thread(self._files.touch, one.name)
        evictable = sum(one.num_bytes for one in models if self._may_evict(one))
        cap = self._rules.max_bytes
        if cap is not None:  # num_bytes must not exceed what the cap leaves
            kept = sum(one.num_bytes for one in models) - evictable
            evictable = min(evictable, max(0, cap - kept) - self._free_bytes)
        self._evictable_bytes = evictable

    async def storage(self) -> dict[str, Any]:
        """Returns the disk use of models here as plain JSON values."""
        models = await asyncio.to_thread(self._files.fetched)
        used = self.use.used
        return {
            "path": str(self._files.root),
            "total_bytes": self._disk.total_bytes,
            "free_bytes": self._disk.free_bytes,
            "floor_bytes": self._disk.floor_bytes,
            "max_bytes": self._rules.max_bytes,
            "used_bytes": sum(one.num_bytes for one in models),
            "models": [
                {
                    "name": one.name,
                    "bytes": one.num_bytes,
                    "whole": one.is_whole,
                    "pinned": one.is_pinned,
                    "staged": bool(one.store),
                    "used_at": one.used_at,
                    "in_use": one.name in used,
                }
                for one in models
            ],
        }

    async def sweep_if_changed(self) -> None:
        """Calls `sweep` the first time, and whenever instances or the models of the store have changed."""
        host = self._store.remote
        state = self.use.used, None if host is None else (host.id, host.info.models, host.info.partial_models)
        if state != self._swept:
            self._swept = state
            await self.sweep()

    async def sweep(self, *, keeps_recent: bool = True) -> bool:
        """Deletes staged copies that nothing uses: of models that the store has deleted, and those over the limit for
        recent copies. keeps_recent: False deletes all of them. Returns whether any was deleted."""
        staged = [one for one in await asyncio.to_thread(self._files.fetched) if one.store]
        lost = {one.name for one in staged if not keeps_recent or await self._store.has_lost(one.store, one.name)}
        copies = [
            StagedCopy(one.name, one.num_bytes, one.used_at, not self.use.is_idle(one.name), one.name in lost)
            for one in staged
        ]
        gone = surplus(copies, self._rules.store.keep_bytes, time.time())
        for model in gone:
            if self.use.is_idle(model):  # checked again, because deleting the earlier ones took time
                _log.info("deleting the unused staged copy of %s", model)
                try:
                    await self.drop(model)
                except FetchError as exc:
                    _log.warning("the staged copy of %s cannot be deleted: %s", model, exc)
        return bool(gone)

    async def drop(self, model: str) -> int | None:
        """Deletes what was fetched of a model, even if it is in use. Returns the freed bytes, None if there are none.

        Raises FetchError if it cannot be deleted.
        """
        self._records.forget(model)
        async with self.use.turn(model):
            freed_bytes = await asyncio.to_thread(self._files.delete, model)
        if freed_bytes is not None:
            await self._on_change()
        return freed_bytes

    async def make(self, model: str, num_bytes: int) -> None:
        """Deletes the least recently used models until there is room. Raises FetchError if that is not enough."""
        models = await asyncio.to_thread(self._files.fetched)
        while self._files.room(self._rules.max_bytes, models) < num_bytes:
            stale = next((one for one in models if one.name != model and self._may_evict(one)), None)
            if stale is None:
                raise self._no_room(model, num_bytes, models)
            _log.warning("deleting the unused model %s to make room for %s", stale.name, model)
            await self.drop(stale.name)
            models = [one for one in models if one is not stale]

    def _may_evict(self, model: FetchedModel) -> bool:
        may_go = (self._rules.evict_pinned or not model.is_pinned) and not self._rules.store.is_here
        return may_go and self.use.is_idle(model.name)

    def _no_room(self, model: str, num_bytes: int, models: Sequence[FetchedModel]) -> FetchError:
        room, cap = self._files.room(self._rules.max_bytes, models), self._rules.max_bytes
        what = f"{model} needs {gigabytes(num_bytes)} on this disk, but only {gigabytes(room)} may be used"
        if cap is not None and room < self._files.room(None, models):
            what += f": the limit for all models is {gigabytes(cap)} (--models-max-size)"
        pinned = ", or allow the deletion of models that were pulled by name (--evict-pinned)"
        keeps = any(one.is_pinned for one in models) and not self._rules.evict_pinned
        return FetchError(what, remedy=f"delete models with `exo-mesh rm`{pinned if keeps else ''}", is_final=True)

"""Tells the mesh what this node fetches: a record per model, changed at most twice a second."""

from __future__ import annotations

import asyncio

from exo_mesh.domain.download import DownloadInfo, DownloadState
from exo_mesh.membership.service import Membership
from exo_mesh.tasks import TaskOwner

TELL_EVERY_S = 0.5
"""Between two records of one download."""

COMPLETED_S = 60.0
"""How long a download that has come to its end is shown."""

MAX_FAILED = 16
"""Failed downloads that are shown, until they are tried again; the oldest go first."""


class DownloadRecords:
    """Its tasks belong to `tasks`."""

    def __init__(self, membership: Membership, tasks: TaskOwner) -> None:
        self._membership = membership
        self._tasks = tasks
        self._infos: dict[str, DownloadInfo] = {}
        self._telling: set[str] = set()

    @property
    def failed(self) -> list[DownloadInfo]:
        return [info for info in self._infos.values() if info.state is DownloadState.FAILED]

    def note(self, info: DownloadInfo) -> None:
        """Tell of a download: at once, or soon if it was told of just now."""
        self._infos.pop(info.model, None)
        self._infos[info.model] = info
        failed = self.failed
        for one in failed[: max(0, len(failed) - MAX_FAILED)]:
            self.forget(one.model)
        if info.model not in self._telling:
            self._telling.add(info.model)
            self._membership.put_download(info.model, info)
            self._tasks.start(self._tell_on(info), f"tell of {info.model}")

    def forget(self, model: str) -> bool:
        """Take back what was told; False if there is nothing."""
        if self._infos.pop(model, None) is None:
            return False
        self._membership.put_download(model, None)
        return True

    async def _tell_on(self, told: DownloadInfo) -> None:
        model = told.model
        try:
            while True:
                await asyncio.sleep(TELL_EVERY_S)
                info = self._infos.get(model)
                if info is None or info is told:
                    break
                told = info
                self._membership.put_download(model, info)
        finally:
            self._telling.discard(model)
        if info is told and told.state is DownloadState.COMPLETED:
            await asyncio.sleep(COMPLETED_S)
            if self._infos.get(model) is told:
                self.forget(model)

"""Counts this node's fetches and publishes them to the mesh: a record per model, changed at most twice a second."""

from __future__ import annotations

import asyncio

from exo_mesh.base.tasks import TaskOwner
from exo_mesh.domain.download import DownloadInfo, DownloadState
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.downloads.tally import DownloadTally

PUBLISH_EVERY_S = 0.5
"""Shortest time between two versions of one record."""

COMPLETED_S = 60.0
"""How long a completed download stays in the view."""

MAX_FAILED = 16
"""Failed downloads stay in the view until they are tried again; above this number the oldest are dropped."""


class DownloadRecords:
    """The records of this node's downloads. tasks: owns the tasks that publish later versions."""

    def __init__(self, membership: Membership, tasks: TaskOwner) -> None:
        self._membership = membership
        self._tasks = tasks
        self.tally = DownloadTally()
        self._infos: dict[str, DownloadInfo] = {}
        self._publishing: set[str] = set()

    @property
    def failed(self) -> list[DownloadInfo]:
        return [info for info in self._infos.values() if info.state is DownloadState.FAILED]

    def note(self, info: DownloadInfo) -> None:
        """Publishes a download: at once, or within PUBLISH_EVERY_S if its record has just changed."""
        self._infos.pop(info.model, None)
        self._infos[info.model] = info
        failed = self.failed
        for one in failed[: max(0, len(failed) - MAX_FAILED)]:
            self.forget(one.model)
        if info.model not in self._publishing:
            self._publishing.add(info.model)
            self._membership.put_download(info.model, info)
            self._tasks.start(self._publish_later(info), f"publish the download of {info.model}")

    def forget(self, model: str) -> bool:
        """Deletes the record of a download; False if there is none."""
        if self._infos.pop(model, None) is None:
            return False
        self._membership.put_download(model, None)
        return True

    async def _publish_later(self, published: DownloadInfo) -> None:
        model = published.model
        try:
            while True:
                await asyncio.sleep(PUBLISH_EVERY_S)
                info = self._infos.get(model)
                if info is None or info is published:
                    break
                published = info
                self._membership.put_download(model, info)
        finally:
            self._publishing.discard(model)
        if info is published and published.state is DownloadState.COMPLETED:
            await asyncio.sleep(COMPLETED_S)
            if self._infos.get(model) is published:
                self.forget(model)

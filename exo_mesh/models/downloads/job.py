"""One fetch of this node, and the meter of its bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from exo_mesh.base.tasks import ChangeSignal
from exo_mesh.domain.download import DownloadInfo, DownloadState
from exo_mesh.domain.fetch_plan import HUB
from exo_mesh.errors import FetchError
from exo_mesh.models.downloads.sources import FetchNeed, OtherFetches
from exo_mesh.models.downloads.tally import DownloadTally, FetchTally

STEP_S = 2.0
"""Waiters for a fetch get a progress report at least this often, so that their lease does not expire."""


@dataclass(eq=False)
class FetchJob:
    """One fetch that runs or is queued. is_pull: continues without waiters. watchers: number of waiters.
    elsewhere: what other peers fetched of the model for other reasons when this fetch was last planned. here_bytes:
    wanted bytes that were on the disk at that time. files: files with missing bytes."""

    need: FetchNeed
    info: DownloadInfo
    is_pull: bool = False
    watchers: int = 0
    num_plans: int = 0
    here_bytes: int = 0
    elsewhere: OtherFetches = frozenset()
    files: set[str] = field(default_factory=set)
    changed: ChangeSignal = field(default_factory=ChangeSignal)
    task: asyncio.Task[None] | None = None

    @property
    def model(self) -> str:
        return self.need.model

    @property
    def is_done(self) -> bool:
        return self.task is not None and self.task.done()

    async def next_step(self) -> None:
        """Waits for the end of the fetch, for progress, or for STEP_S."""
        assert self.task is not None, "it has been started"
        await either(self.task, self.changed, STEP_S)

    def raise_outcome(self) -> None:
        """Raises the error that ended a finished fetch, if one did."""
        assert self.task is not None, "it has been started"
        if self.task.cancelled():
            raise FetchError(f"fetching {self.model} was cancelled", remedy="start the download again", is_final=True)
        self.task.result()


class FetchMeter:
    """Turns the progress of one fetch into its record. Bytes by source continue from an earlier attempt."""

    def __init__(self, job: FetchJob, update: Callable[[FetchJob, DownloadInfo], None], tally: DownloadTally) -> None:
        self._job = job
        self._tally = FetchTally(tally)
        self._update = update
        self._hub_before, self._peers_before = job.info.from_hub_bytes, job.info.from_peers_bytes
        self._last: tuple[float, int] | None = None
        self._bytes_per_s = 0.0

    def take(self, done: int, total: int, num_bytes: Mapping[str, int]) -> None:
        self._tally.take(done, num_bytes)
        now = asyncio.get_running_loop().time()
        if self._last is not None and now > self._last[0]:
            speed = max(0, done - self._last[1]) / (now - self._last[0])
            self._bytes_per_s = 0.7 * self._bytes_per_s + 0.3 * speed if self._bytes_per_s else speed
        self._last = now, done
        left, here = max(0, total - done), self._job.here_bytes
        from_hub = num_bytes.get(HUB, 0)
        info = replace(
            self._job.info,
            state=DownloadState.ONGOING,
            done_bytes=here + done,
            total_bytes=here + total,
            bytes_per_s=round(self._bytes_per_s, 1),
            eta_s=round(left / self._bytes_per_s, 1) if self._bytes_per_s else 0.0,
            from_hub_bytes=self._hub_before + from_hub,
            from_peers_bytes=self._peers_before + sum(num_bytes.values()) - from_hub,
        )
        self._update(self._job, info)


async def either(task: asyncio.Future[None], changed: ChangeSignal, timeout_s: float) -> None:
    """Waits until the task ends, something changes, or the time is up."""
    waiting: Coroutine[Any, Any, bool] = changed.wait(timeout_s)
    waiter = asyncio.ensure_future(waiting)
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)

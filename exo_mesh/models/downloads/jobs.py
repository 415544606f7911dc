"""The running fetches of this node: shared by equal requests, planned, retried, and ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from exo_mesh.base.printable import reason_of
from exo_mesh.base.tasks import TaskOwner
from exo_mesh.domain.download import DownloadInfo, DownloadState, FetchStep
from exo_mesh.domain.footprint import gigabytes
from exo_mesh.errors import FetchError, ModelError, UnknownModelError
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.downloads.checks import FileChecks
from exo_mesh.models.downloads.job import FetchJob, FetchMeter, either
from exo_mesh.models.downloads.records import DownloadRecords
from exo_mesh.models.downloads.room import ModelRoom
from exo_mesh.models.downloads.sources import FetchNeed, ModelSources
from exo_mesh.models.fetcher.wire import Share
from exo_mesh.models.fetching import Fetcher
from exo_mesh.models.local_files import Layers, LocalFiles, size_of_pieces

LINGER_S = 10.0
"""A fetch for a stage goes on this long without waiters: an owner may only be reconnecting."""

MAX_TRIES = 3
"""A fetch whose sources failed is planned again up to this often: peers may have joined, left, or fetched more."""

RETRY_S = 1.0

MAX_JOBS = 64
"""Most running and queued fetches of one node; each has a task and a record in the view."""

PLAN_AGAIN_S = 1.0
"""Time between two new plans of one fetch because of other peers' fetches; the first new plan is made at once."""

_log = logging.getLogger(__name__)


class FetchJobs:
    """Runs one fetch per model and layers; fetches of one model run one after the other."""

    def __init__(
        self,
        membership: Membership,
        files: LocalFiles,
        fetcher: Fetcher,
        sources: ModelSources,
        room: ModelRoom,
        records: DownloadRecords,
        checks: FileChecks,
        tasks: TaskOwner,
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        """tasks: owns the fetches. on_change: publishes which models are here now."""
        self._membership = membership
        self._files = files
        self._fetcher = fetcher
        self._sources = sources
        self._room = room
        self._use = room.use
        self._records = records
        self._checks = checks
        self._tasks = tasks
        self._on_change = on_change
        self._jobs: dict[tuple[str, Layers], FetchJob] = {}

    @property
    def running(self) -> list[FetchJob]:
        """All fetches, the queued ones included."""
        return list(self._jobs.values())

    def start(self, need: FetchNeed, *, is_pull: bool = False) -> FetchJob:
        """Returns the running fetch of these layers, or starts one. is_pull: continues without waiters.

        Raises FetchError if too many fetches run.
        """
        key = need.model, need.layers
        job = self._jobs.get(key)
        if job is None and len(self._jobs) >= MAX_JOBS:
            raise FetchError(
                f"this node runs {len(self._jobs)} downloads, the most that it may run",
                remedy="try again when some are done",
            )
        if job is None:
            job = self._jobs[key] = FetchJob(need, new_info(need.model, need.layers, DownloadState.PENDING))
            self._use.begin_fetch(need.model)
            self._records.note(job.info)
            job.task = self._tasks.start(self._run(job), f"fetch {need.model}")
            job.task.add_done_callback(partial(self._ended, job))  # also if it is cancelled before it begins
        if need.from_hub and not job.need.from_hub:
            job.need = need  # for the next plan of the fetch
        job.is_pull |= is_pull
        return job

    async def steps(self, job: FetchJob) -> AsyncGenerator[FetchStep, None]:
        """Yields the progress of a fetch until it is done. Raises FetchError if it fails."""
        job.watchers += 1
        try:
            while not job.is_done:
                yield FetchStep(job.info.done_bytes, job.info.total_bytes)
                await job.next_step()
            job.raise_outcome()
        finally:
            job.watchers -= 1
            if not job.watchers and not job.is_pull and not job.is_done:
                asyncio.get_running_loop().call_later(LINGER_S, self._end_if_alone, job)

    async def cancel(self, model: str) -> bool:
        """Ends the fetches of a model, keeping the fetched bytes; False if there is none."""
        jobs = [job for job in self.running if job.model == model]
        tasks = [job.task for job in jobs if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return bool(jobs)

    def _end_if_alone(self, job: FetchJob) -> None:
        if not job.watchers and not job.is_pull and job.task is not None:
            job.task.cancel()

    def _ended(self, job: FetchJob, task: asyncio.Task[None]) -> None:
        del self._jobs[job.need.model, job.need.layers]
        self._use.end_fetch(job.model)

    async def _run(self, job: FetchJob) -> None:
        self._records.tally.running += 1
        try:
            async with self._use.turn(job.model):
                self._sources.rules.require(from_hub=False)
                began = asyncio.get_running_loop().time()
                await self._fetch(job)
                took_s = asyncio.get_running_loop().time() - began
            await self._checks.check(job.model, job.need.layers, took_s)
        except FetchError as exc:
            self._records.tally.failed[exc.code] += 1
            self._records.tally.ended["failed"] += 1
            _log.warning("fetching %s failed: %s", job.model, exc)
            failed = replace(job.info, state=DownloadState.FAILED, reason=str(exc), remedy=exc.remedy)
            self._update(job, replace(failed, bytes_per_s=0.0, eta_s=0.0))
            raise
        except asyncio.CancelledError:
            self._records.forget(job.model)
            self._records.tally.ended["cancelled"] += 1
            raise
        else:
            self._records.tally.ended["done"] += 1
            self._records.tally.files += len(job.files)
            done = replace(job.info, state=DownloadState.COMPLETED, done_bytes=job.info.total_bytes, eta_s=0.0)
            self._update(job, done)
            if job.is_pull:
                await asyncio.to_thread(self._files.forget_pulls, job.model, job.need.layers)
            await self._on_change()
        finally:
            self._records.tally.running -= 1

    async def _fetch(self, job: FetchJob) -> None:
        """Plans and fetches, and repeats both if sources fail. Raises FetchError."""
        model_dir = await asyncio.to_thread(self._files.model_dir, job.model)
        for attempt in range(MAX_TRIES):
            try:
                while not await self._fetch_as_planned(job, model_dir):
                    _log.info("planning the fetch of %s again: another peer started or stopped fetching it", job.model)
                break
            except FetchError as exc:
                if exc.is_final or attempt == MAX_TRIES - 1:
                    raise
                _log.info("planning the fetch of %s again: %s", job.model, exc)
            except (ModelError, UnknownModelError, OSError) as exc:
                raise FetchError(f"{job.model}: {reason_of(exc)}") from exc
            await asyncio.sleep(RETRY_S)
        if left := size_of_pieces(await asyncio.to_thread(self._files.missing, job.model, job.need.layers)):
            raise FetchError(f"{gigabytes(left)} of {job.model} are still missing after the fetch")

    async def _fetch_as_planned(self, job: FetchJob, model_dir: Path) -> bool:
        """Fetches by a plan made now. Returns False if another peer has since begun to fetch the same model, or has
        stopped without completing it: a new plan then ensures that each byte comes from the hub once. Raises
        FetchError."""
        shares = await self._shares(job)
        if not shares:
            return True
        job.num_plans += 1
        loop = asyncio.get_running_loop()
        until = loop.time() + (PLAN_AGAIN_S if job.num_plans > 1 else 0.0)
        fetching = asyncio.ensure_future(self._fetch_all(job, model_dir, shares))
        try:
            while not fetching.done():
                if loop.time() >= until and self._sources.is_outdated(job.need, job.elsewhere):
                    return False
                await either(fetching, self._membership.changed, PLAN_AGAIN_S)
            fetching.result()
            return True
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)

    async def _fetch_all(self, job: FetchJob, model_dir: Path, shares: Sequence[Share]) -> None:
        await self._fetcher.fetch(model_dir, shares, FetchMeter(job, self._update, self._records.tally).take)

    async def _shares(self, job: FetchJob) -> list[Share]:
        """Plans which bytes to fetch from where. Raises FetchError if there is no room or no source."""
        job.elsewhere = self._sources.fetched_elsewhere(job.need)
        missing = await asyncio.to_thread(self._files.missing, job.model, job.need.layers)
        if not missing:
            return []
        pieces = await asyncio.to_thread(self._files.pieces, job.model, job.need.layers)
        job.files.update(missing)
        job.here_bytes = size_of_pieces(pieces) - size_of_pieces(missing)
        await self._room.make(job.model, size_of_pieces(missing))
        return await self._sources.shares(job.need, missing, job.elsewhere)

    def _update(self, job: FetchJob, info: DownloadInfo) -> None:
        job.info = info
        job.changed.beat()
        self._records.note(info)


def new_info(model: str, layers: Layers, state: DownloadState) -> DownloadInfo:
    """Returns the record of a new download, with only its model and layers."""
    return DownloadInfo(model, state, layers=layers or (0, 0), is_whole=layers is None)

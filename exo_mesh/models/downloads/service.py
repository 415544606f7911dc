"""The entry point for all fetching and deleting of models on this node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from exo_mesh.base.tasks import TaskOwner
from exo_mesh.domain.download import DownloadEntry, DownloadInfo, DownloadState, FetchStep, entry_of
from exo_mesh.domain.footprint import gigabytes
from exo_mesh.domain.plan import Plan
from exo_mesh.errors import FetchError, InputError, ModelError, UnknownModelError
from exo_mesh.machine.disk import Disk
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.downloads.checks import FileChecks, OnWrong
from exo_mesh.models.downloads.jobs import FetchJobs, new_info
from exo_mesh.models.downloads.model_headers import ModelHeaders
from exo_mesh.models.downloads.records import DownloadRecords
from exo_mesh.models.downloads.room import ModelRoom
from exo_mesh.models.downloads.rules import FetchRules
from exo_mesh.models.downloads.sources import FetchNeed, ModelSources
from exo_mesh.models.downloads.use import ModelUse
from exo_mesh.models.fetcher.wire import HubModel
from exo_mesh.models.fetching import Fetcher
from exo_mesh.models.local_files import Holding, Layers, LocalFiles, Wants, size_of_pieces
from exo_mesh.models.mesh_store import MeshStore

_log = logging.getLogger(__name__)


class Downloads:
    """Fetches and deletes models on this node. Every peer sees running and failed downloads in the view.

    store: the mesh's model store. room: the disk space of models here, and what may be deleted.
    """

    def __init__(
        self,
        membership: Membership,
        catalogue: Catalogue,
        files: LocalFiles,
        fetcher: Fetcher,
        disk: Disk,
        rules: FetchRules,
        on_change: Callable[[], Awaitable[None]],
        on_wrong: OnWrong,
    ) -> None:
        """on_change: publishes which models are here now. on_wrong: see FileChecks."""
        self._membership = membership
        self._files = files
        self._fetcher = fetcher
        self.rules = rules
        self._tasks = TaskOwner()
        self._records = records = DownloadRecords(membership, self._tasks)
        self.tally = records.tally
        self.store = store = MeshStore(membership, rules.store)
        self._use = use = ModelUse(membership)
        sources = ModelSources(membership, files, rules, store)
        self.room = ModelRoom(files, disk, rules, store, use, records, on_change)
        self._introductions = ModelHeaders(catalogue, files, fetcher, sources, use, records, on_change)
        self._checks = checks = FileChecks(membership, files, fetcher, sources, self._tasks, on_wrong)
        self.jobs = FetchJobs(membership, files, fetcher, sources, self.room, records, checks, self._tasks, on_change)

    async def close(self) -> None:
        """Ends all fetches, keeping the fetched bytes."""
        await self._tasks.close()

    def entries(self) -> list[DownloadEntry]:
        """Returns the downloads of all peers."""
        names = {peer.id: peer.name for peer in self._membership.view.peers()}
        return [entry_of(owner, names.get(owner, ""), info) for owner, info in self._membership.view.downloads()]

    def begun(self, model: str, wants: Wants) -> list[DownloadEntry]:
        """Returns the downloads of a model at these peers; a peer without a record yet counts as pending."""
        heard = {one.peer_id: one for one in self.entries() if one.model == model}
        names = {peer.id: peer.name for peer in self._membership.view.peers()}
        return [
            heard.get(peer_id)
            or entry_of(peer_id, names.get(peer_id, ""), new_info(model, layers, DownloadState.PENDING))
            for peer_id, layers in wants.items()
        ]

    def failed_here(self) -> list[DownloadInfo]:
        """Returns the downloads that failed on this node and were not retried since."""
        return self._records.failed

    async def holding(self, model: str) -> Holding | None:
        """Which files of a model this node has; None if it has none, or cannot read them."""
        try:
            return await asyncio.to_thread(self._files.holding, model)
        except (UnknownModelError, ModelError, OSError):
            return None

    async def search(self, query: str, limit: int) -> list[HubModel]:
        """Searches models on the hub. Raises FetchError."""
        self.rules.require(from_hub=True)
        return list(await self._fetcher.search(query, limit))

    async def resolve(self, name: str, repo: str, revision: str, *, allows_code: bool = False) -> None:
        """Fetches config, tokenizer and headers of a model from the hub. allows_code: also code of its repository.

        Raises UnknownModelError, FetchError, and ModelError if no engine could run the model.
        """
        await self._introductions.from_hub(name, repo, revision, allows_code=allows_code)

    async def introduce(self, name: str, digest: str) -> None:
        """Fetches config, tokenizer and headers of a model from peers, unless they are here.

        Raises FetchError, and ModelError if this node has another model of that name.
        """
        await self._introductions.from_peers(name, digest)

    async def of_stage(self, plan: Plan, index: int) -> AsyncGenerator[FetchStep, None]:
        """Fetches what a stage of a plan needs; yields the progress until all of it is here. Raises FetchError."""
        wants: dict[str, Layers] = {
            peer_id: (stage.shard.start, stage.shard.stop) for stage in plan.stages for peer_id in stage.peers
        }
        shard = plan.stages[index].shard
        async with aclosing(self.ensure(plan.model, (shard.start, shard.stop), wants)) as steps:
            async for step in steps:
                yield step

    async def ensure(self, model: str, layers: Layers, wants: Wants | None = None) -> AsyncGenerator[FetchStep, None]:
        """Like of_stage, for any layers; equal requests share one fetch."""
        await asyncio.to_thread(self._files.touch, model)
        if not await asyncio.to_thread(self._files.missing, model, layers):
            await self._checks.check(model, layers, 0.0)
            return
        job = self.jobs.start(FetchNeed(model, layers, wants or {self._membership.own.id: layers}))
        async with aclosing(self.jobs.steps(job)) as steps:
            async for step in steps:
                yield step

    async def bring(self, model: str, digest: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Ensures that these layers of a model are here. Raises FetchError, and ModelError as `introduce`."""
        await self.introduce(model, digest)
        for layers in ranges:
            async for _ in self.ensure(model, layers):
                pass

    async def pull(self, model: str, digest: str, wants: Wants, *, from_hub: bool = True, hub_user: str = "") -> None:
        """Starts to fetch this node's part of a model that was pulled by name. May raise FetchError and ModelError.

        from_hub, hub_user: see FetchNeed. A pull that may not use the hub is not resumed after a restart, and does not
        keep the files: a stranger may have asked for it.
        """
        own_id = self._membership.own.id
        if own_id not in wants:
            raise InputError(f"the request to pull {model} names no part for this peer")
        if digest:  # a model without a digest has no card, and `resolve` was called for it
            await self.introduce(model, digest)
        layers = wants[own_id]
        if from_hub:
            await asyncio.to_thread(self._files.note_pull, model, layers)
        if await asyncio.to_thread(self._files.missing, model, layers):
            self.jobs.start(FetchNeed(model, layers, wants, from_hub, hub_user), is_pull=True)
        else:
            await asyncio.to_thread(self._files.forget_pulls, model, layers)
            self._records.note(new_info(model, layers, DownloadState.COMPLETED))

    async def resume_pulls(self) -> None:
        """Resumes the pulls that were running, or had failed, when this node last ended."""
        if not self.rules.fetches:
            return
        for model, layers in await asyncio.to_thread(self._files.unfinished_pulls):
            try:
                missing = await asyncio.to_thread(self._files.missing, model, layers)
                if missing:
                    self.jobs.start(FetchNeed(model, layers, {self._membership.own.id: layers}), is_pull=True)
                    _log.info("resuming the pull of %s: %s are missing", model, gigabytes(size_of_pieces(missing)))
                else:
                    await asyncio.to_thread(self._files.forget_pulls, model, layers)
            except (UnknownModelError, ModelError, FetchError, OSError) as exc:
                _log.warning("the pull of %s cannot be resumed: %s", model, exc)

    async def cancel(self, model: str) -> bool:
        """Ends the fetches of a model, and removes a failed one; fetched bytes are kept. False if there is none."""
        was_running = await self.jobs.cancel(model)
        await asyncio.to_thread(self._files.forget_pulls, model)
        return self._records.forget(model) or was_running

    async def drop(self, model: str, files: bool, staged: bool) -> int | None:
        """Ends the fetches of a model and, with `files`, deletes what was fetched; with `staged`, deletes the unused
        staged copies of all models. Returns the freed bytes, None if there was nothing to drop."""
        if files and not staged:
            return await self.delete(model)
        work = self.room.sweep(keeps_recent=False) if staged else self.cancel(model)
        return 0 if await work else None

    async def delete(self, model: str) -> int | None:
        """Deletes what was fetched of a model. Returns the freed bytes on the disk, None if nothing was fetched.

        Raises InputError if an instance uses the model, and FetchError if it cannot be deleted.
        """
        if model in self._use.used:
            raise InputError(f"{model} is in use; delete its instances first", param="model")
        await self.cancel(model)
        freed_bytes = await self.room.drop(model)
        if freed_bytes is not None:
            _log.info("deleted what was fetched of %s: %s", model, gigabytes(freed_bytes))
        return freed_bytes

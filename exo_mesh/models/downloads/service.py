"""Everything that this node fetches of models, for those who ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from exo_mesh.domain.download import DownloadEntry, DownloadInfo, DownloadState, FetchStep, entry_of
from exo_mesh.domain.plan import Plan
from exo_mesh.errors import InputError, ModelError, UnknownModelError
from exo_mesh.fetcher.wire import HubModel
from exo_mesh.machine.disk import Disk
from exo_mesh.membership.service import Membership
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.downloads.introductions import Introductions
from exo_mesh.models.downloads.jobs import FetchJobs, new_info
from exo_mesh.models.downloads.port import FileFetcher
from exo_mesh.models.downloads.records import DownloadRecords
from exo_mesh.models.downloads.room import ModelRoom
from exo_mesh.models.downloads.rules import FetchRules
from exo_mesh.models.downloads.sources import FetchNeed, ModelSources
from exo_mesh.models.downloads.use import ModelUse
from exo_mesh.models.file_codec import holding_to_proto
from exo_mesh.models.local_files import Layers, LocalFiles, Wants
from exo_mesh.models.mesh_store import MeshStore
from exo_mesh.proto import control_pb2 as pb
from exo_mesh.tasks import TaskOwner

_log = logging.getLogger(__name__)


class Downloads:
    """Gets models here and deletes them. What there is and what failed is in the view, for everybody.

    store: the mesh's model store. room: what models take on the disk, and what may be deleted.
    """

    def __init__(
        self,
        membership: Membership,
        catalogue: Catalogue,
        files: LocalFiles,
        fetcher: FileFetcher,
        disk: Disk,
        rules: FetchRules,
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        """on_change: publishes which models are here now."""
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
        self._introductions = Introductions(catalogue, files, fetcher, sources, use, records, on_change)
        self.jobs = FetchJobs(membership, files, fetcher, sources, self.room, use, records, self._tasks, on_change)

    async def close(self) -> None:
        """End all fetches, keeping what came."""
        await self._tasks.close()

    def entries(self) -> list[DownloadEntry]:
        """The downloads of all peers."""
        names = {peer.id: peer.name for peer in self._membership.view.peers()}
        return [entry_of(owner, names.get(owner, ""), info) for owner, info in self._membership.view.downloads()]

    def failed_here(self) -> list[DownloadInfo]:
        """What failed on this node and was not tried again since."""
        return self._records.failed

    async def describe(self, model: str) -> pb.DescribeFilesReply:
        """Answer a peer that asks what this node has of a model."""
        try:
            holding = await asyncio.to_thread(self._files.holding, model)
        except (UnknownModelError, ModelError, OSError):
            return pb.DescribeFilesReply(found=False)
        return holding_to_proto(holding)

    async def search(self, query: str, limit: int) -> list[HubModel]:
        """Models of the hub. Raises FetchError."""
        self.rules.require(from_hub=True)
        return list(await self._fetcher.search(query, limit))

    async def resolve(self, name: str, repo: str, revision: str, *, allows_code: bool = False) -> None:
        """Get config, tokenizer and headers of a model from the hub. allows_code: code of its repository, too.

        Raises UnknownModelError, FetchError, and ModelError if no engine could run it."""
        await self._introductions.from_hub(name, repo, revision, allows_code=allows_code)

    async def introduce(self, name: str, digest: str) -> None:
        """Get config, tokenizer and headers of a model from peers, unless they are here.

        Raises FetchError, and ModelError if this node has another model of that name.
        """
        await self._introductions.from_peers(name, digest)

    async def of_stage(self, plan: Plan, index: int) -> AsyncGenerator[FetchStep, None]:
        """Bring what the stage of a plan needs; says how far it is until it is here. Raises FetchError."""
        wants: dict[str, Layers] = {
            peer_id: (stage.shard.start, stage.shard.stop) for stage in plan.stages for peer_id in stage.peers
        }
        shard = plan.stages[index].shard
        async with aclosing(self.ensure(plan.model, (shard.start, shard.stop), wants)) as steps:
            async for step in steps:
                yield step

    async def ensure(self, model: str, layers: Layers, wants: Wants | None = None) -> AsyncGenerator[FetchStep, None]:
        """As of_stage, for any layers; who asks for the same joins the fetch that is under way."""
        await asyncio.to_thread(self._files.touch, model)
        if not await asyncio.to_thread(self._files.missing, model, layers):
            return
        job = self.jobs.start(FetchNeed(model, layers, wants or {self._membership.own.id: layers}))
        async with aclosing(self.jobs.steps(job)) as steps:
            async for step in steps:
                yield step

    async def bring(self, model: str, digest: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Have these layers of a model here. Raises FetchError, and ModelError if this node has another model of that
        name."""
        await self.introduce(model, digest)
        for layers in ranges:
            async for _ in self.ensure(model, layers):
                pass

    async def pull(self, model: str, digest: str, wants: Wants) -> None:
        """Start to fetch this node's part of what somebody has asked for by name. Raises FetchError and ModelError if
        that cannot begin."""
        own_id = self._membership.own.id
        if own_id not in wants:
            raise InputError(f"nothing of {model} was asked of this peer")
        if digest:  # else it has no card, and `resolve` was called for it
            await self.introduce(model, digest)
        await asyncio.to_thread(self._files.touch, model, is_pinned=True)
        if await asyncio.to_thread(self._files.missing, model, wants[own_id]):
            self.jobs.start(FetchNeed(model, wants[own_id], wants), is_pull=True)
        else:
            self._records.note(new_info(model, wants[own_id], DownloadState.COMPLETED))

    async def cancel(self, model: str) -> bool:
        """End the fetches of a model, and forget one that failed; what came is kept. False if there is none."""
        was_running = await self.jobs.cancel(model)
        return self._records.forget(model) or was_running

    async def delete(self, model: str) -> bool:
        """Delete what was fetched of a model; False if nothing was. Raises InputError if an instance uses it."""
        if model in self._use.used:
            raise InputError(f"{model} is in use; delete its instances first", param="model")
        await self.cancel(model)
        gone = await self.room.drop(model)
        if gone:
            _log.info("deleted what was fetched of %s", model)
        return gone

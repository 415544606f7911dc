"""Everything that this node fetches of models: who asked for it, where the bytes come from, and how far it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

from exo_mesh.domain.download import DownloadEntry, DownloadInfo, DownloadState, FetchStep, entry_of, new_info
from exo_mesh.domain.fetch_plan import HUB, PlannedShare, fetch_plan
from exo_mesh.domain.footprint import gigabytes
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.spans import Pieces, Spans, merged, minus
from exo_mesh.domain.staging import StagedCopy, surplus
from exo_mesh.errors import FetchError, InputError, MeshError, ModelError, UnknownModelError
from exo_mesh.fetcher.wire import HubModel, Share, Source
from exo_mesh.machine.disk import Disk
from exo_mesh.membership.peers import Peer
from exo_mesh.membership.service import Membership
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.download_records import DownloadRecords
from exo_mesh.models.download_tally import DownloadTally, FetchTally
from exo_mesh.models.fetching import OnBytes
from exo_mesh.models.file_codec import holding_from_proto, holding_to_proto
from exo_mesh.models.local_files import FetchedModel, Holding, Layers, LocalFiles, Wants, size_of_pieces
from exo_mesh.models.mesh_store import MeshStore, StoreRules
from exo_mesh.proto import control_pb2 as pb
from exo_mesh.tasks import ChangeSignal, TaskOwner
from exo_mesh.weights.fetched import MANIFEST_FILE

STEP_S = 2.0
"""Who waits for a fetch hears of it at least this often, so that a lease does not run out meanwhile."""

LINGER_S = 10.0
"""A fetch for a stage goes on for so long without anybody who waits for it: an owner may only be reconnecting."""

TOUCH_EVERY_S = 600.0
"""How exactly it is known when a model was last used."""

MAX_TRIES = 3
"""A fetch whose sources have failed is planned again, since peers may have come, gone, or got more meanwhile."""

RETRY_S = 1.0

MAX_JOBS = 64
"""Fetches of one node that are under way or wait; each has a task and a record in the view."""

PLAN_AGAIN_S = 1.0
"""Between two new plans of one fetch because of what others fetch; the first of them is made at once."""

_log = logging.getLogger(__name__)


class FileFetcher(Protocol):
    """What fetches: exo_mesh.models.fetching.Fetcher. All may raise FetchError, UnknownModelError and ModelError."""

    async def resolve(
        self,
        name: str,
        model_dir: Path,
        *,
        repo: str,
        revision: str,
        sources: Sequence[Source],
        trust_remote_code: bool = False,
    ) -> Mapping[str, int]:
        """Make `model_dir` with config, tokenizer, headers and manifest of a model. Answers the bytes by source."""

    async def fetch(
        self, model_dir: Path, shares: Sequence[Share], on_progress: OnBytes | None = None
    ) -> Mapping[str, int]:
        """Bring bytes into a directory that `resolve` has made. Answers the bytes by source; cancelling ends it."""

    async def search(self, query: str, limit: int) -> Sequence[HubModel]:
        """Models of the hub."""


@dataclass(frozen=True, slots=True)
class FetchRules:
    """fetches: one of domain.device.FETCHES. max_bytes: that all fetched models may take together, None: any number.
    evict_pinned: also models that were pulled by name may be deleted to make room. scheme: of the file servers."""

    fetches: str = "hub"
    max_bytes: int | None = None
    evict_pinned: bool = False
    scheme: str = "http"
    store: StoreRules = field(default_factory=StoreRules)


@dataclass(eq=False)
class _Job:
    """One fetch. wants: of all peers that fetch the model for the same reason. is_pull: nobody needs to wait for it.
    elsewhere: what others fetched of the model for reasons of their own, when the fetch was planned last.
    here_bytes: of what is wanted, what was on the disk then."""

    model: str
    layers: Layers
    wants: Wants
    info: DownloadInfo
    is_pull: bool = False
    watchers: int = 0
    num_plans: int = 0
    here_bytes: int = 0
    elsewhere: frozenset[tuple[str, Layers]] = frozenset()
    changed: ChangeSignal = field(default_factory=ChangeSignal)
    task: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        return self.task is not None and self.task.done()

    async def next_step(self) -> None:
        """Wait for its end, for news of it, or for STEP_S."""
        assert self.task is not None, "it has been started"
        await _either(self.task, self.changed, STEP_S)


class Downloads:
    """One fetch per model at a time. What there is and what failed is in the view, for everybody."""

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
        self._catalogue = catalogue
        self._files = files
        self._fetcher = fetcher
        self._disk = disk
        self.rules = rules
        self.tally = DownloadTally()
        self._on_change = on_change
        self._jobs: dict[tuple[str, Layers], _Job] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._evictable_bytes = 0
        self._tasks = TaskOwner()
        self._records = DownloadRecords(membership, self._tasks)
        self.store = MeshStore(membership, rules.store)
        self._swept: object = None

    async def close(self) -> None:
        """End all fetches, keeping what came."""
        await self._tasks.close()

    # what there is

    def entries(self) -> list[DownloadEntry]:
        """The downloads of all peers."""
        names = {peer.id: peer.name for peer in self._membership.view.peers()}
        return [entry_of(owner, names.get(owner, ""), info) for owner, info in self._membership.view.downloads()]

    def begun(self, model: str, wants: Wants) -> list[DownloadEntry]:
        """The downloads of a model at these peers; of a peer from which nothing was heard yet, that it will begin."""
        heard = {one.peer_id: one for one in self.entries() if one.model == model}
        names = {peer.id: peer.name for peer in self._membership.view.peers()}
        return [
            heard.get(peer_id) or entry_of(peer_id, names.get(peer_id, ""), new_info(model, layers))
            for peer_id, layers in wants.items()
        ]

    def failed_here(self) -> list[DownloadInfo]:
        """What failed on this node and was not tried again since."""
        return self._records.failed

    @property
    def room_bytes(self) -> int:
        """What could be fetched now, with what may be deleted for it; 0 if this node fetches nothing."""
        if not self.rules.fetches:
            return 0
        free = max(0, self._disk.free_bytes - self._disk.floor_bytes)
        return free + self._evictable_bytes

    async def refresh(self) -> None:
        """Look at the disk: note which models are in use, drop staged copies, and note how much could be deleted."""
        await self.sweep()
        models = await asyncio.to_thread(self._files.fetched)
        used = self._used()
        for one in models:
            if one.name in used and time.time() - one.used_at > TOUCH_EVERY_S:
                await asyncio.to_thread(self._files.touch, one.name)
        evictable = sum(one.num_bytes for one in models if self._may_evict(one))
        cap = self.rules.max_bytes
        if cap is not None:  # room_bytes must not exceed what the cap leaves
            free = max(0, self._disk.free_bytes - self._disk.floor_bytes)
            kept = sum(one.num_bytes for one in models) - evictable
            evictable = min(evictable, max(0, cap - kept) - free)
        self._evictable_bytes = evictable

    async def storage(self) -> dict[str, Any]:
        """What the models take here, as plain JSON values."""
        models = await asyncio.to_thread(self._files.fetched)
        used = self._used()
        return {
            "path": str(self._files.root),
            "total_bytes": self._disk.total_bytes,
            "free_bytes": self._disk.free_bytes,
            "floor_bytes": self._disk.floor_bytes,
            "max_bytes": self.rules.max_bytes,
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

    async def describe(self, model: str) -> pb.DescribeFilesReply:
        """Answer a peer that asks what this node has of a model."""
        try:
            holding = await asyncio.to_thread(self._files.holding, model)
        except (UnknownModelError, ModelError, OSError):
            return pb.DescribeFilesReply(found=False)
        return holding_to_proto(holding)

    # getting a model known here

    async def resolve(self, name: str, repo: str, revision: str, *, allows_code: bool = False) -> None:
        """Get config, tokenizer and headers of a model from the hub. allows_code: code of its repository, too.

        Raises UnknownModelError, FetchError, and ModelError if no engine could run it."""
        self._refuse_fetching(from_hub=True)
        await self._introduce(name, repo, revision, [Source()], allows_code=allows_code)

    async def introduce(self, name: str, digest: str) -> None:
        """Get config, tokenizer and headers of a model from peers, unless they are here.

        Raises FetchError, and ModelError if this node has another model of that name.
        """
        if await self._is_here(name, digest):
            await asyncio.to_thread(self._files.touch, name)
            return
        self._refuse_fetching(from_hub=False)
        found = [(peer, holding) for peer, holding in await self._holdings(name) if holding.digest == digest]
        if not found:
            raise FetchError(f"no peer that can be asked has the files of {name}")
        _, first = found[0]
        await self._introduce(name, first.repo, first.revision, [self._source(peer) for peer, _ in found])
        if not await self._is_here(name, digest):
            raise FetchError(f"what peers sent of {name} cannot be used")

    async def _is_here(self, name: str, digest: str) -> bool:
        try:
            card = await asyncio.to_thread(self._catalogue.local_card, name)
        except UnknownModelError:
            return False
        if card.digest != digest:
            raise ModelError(
                f"the files of {name} here have digest {card.digest[:12]}, not {digest[:12]}: the peers hold different "
                "versions of the model"
            )
        return True

    async def _introduce(
        self, name: str, repo: str, revision: str, sources: Sequence[Source], *, allows_code: bool = False
    ) -> None:
        target = self._files.target(name)
        async with self._turn(name):
            if not await asyncio.to_thread(_is_model, target):
                num_bytes = await self._fetcher.resolve(
                    name, target, repo=repo, revision=revision, sources=sources, trust_remote_code=allows_code
                )
                self.tally.add(num_bytes)
                if not await asyncio.to_thread(_is_model, target):  # the fetcher leaves what is there alone
                    raise FetchError(
                        f"the place of {name} below the directory of fetched models is taken by files of no model",
                        remedy="move them away", is_final=True,
                    )  # fmt: skip
                await asyncio.to_thread(self._files.touch, name, store=self.store.staged_from(name))
                await self._on_change()

    def _refuse_fetching(self, *, from_hub: bool) -> None:
        if not self.rules.fetches:
            raise FetchError("this node fetches no models (--no-fetch)", remedy="start it without", is_final=True)
        if from_hub and self.rules.fetches != "hub":
            raise FetchError(
                "this node asks no hub (--offline)", remedy="start it without, or start a peer that has the model",
                is_final=True,
            )  # fmt: skip

    # fetching

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
        job = self._job(model, layers, wants or {self._membership.own.id: layers})
        job.watchers += 1
        try:
            while not job.is_done:
                yield FetchStep(job.info.done_bytes, job.info.total_bytes)
                await job.next_step()
            _raise_outcome(job)
        finally:
            job.watchers -= 1
            if not job.watchers and not job.is_pull and not job.is_done:
                asyncio.get_running_loop().call_later(LINGER_S, self._end_if_alone, job)

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
        layers = wants[own_id]
        await asyncio.to_thread(self._files.note_pull, model, layers)
        if await asyncio.to_thread(self._files.missing, model, layers):
            self._job(model, layers, wants).is_pull = True
        else:
            await asyncio.to_thread(self._files.forget_pulls, model, layers)
            self._records.note(new_info(model, layers, DownloadState.COMPLETED))

    async def resume_pulls(self) -> None:
        """Go on with the pulls that were under way, or had failed, when this node ended last."""
        if not self.rules.fetches:
            return
        for model, layers in await asyncio.to_thread(self._files.unfinished_pulls):
            try:
                missing = await asyncio.to_thread(self._files.missing, model, layers)
            except (UnknownModelError, ModelError, OSError) as exc:
                _log.warning("the pull of %s cannot go on: %s", model, exc)
                continue
            if missing:
                if len(self._jobs) >= MAX_JOBS:
                    break
                _log.info("going on with the pull of %s: %s are missing", model, gigabytes(size_of_pieces(missing)))
                self._job(model, layers, {self._membership.own.id: layers}).is_pull = True
            else:
                await asyncio.to_thread(self._files.forget_pulls, model, layers)

    async def cancel(self, model: str) -> bool:
        """End the fetches of a model, and forget one that failed; what came is kept. False if there is none."""
        jobs = [job for job in self._jobs.values() if job.model == model]
        tasks = [job.task for job in jobs if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._files.forget_pulls, model)
        return self._records.forget(model) or bool(jobs)

    async def delete(self, model: str) -> int | None:
        """Delete what was fetched of a model; answers the bytes that it took on the disk, None if nothing was fetched.

        Raises InputError if an instance uses it, and FetchError if it cannot be deleted."""
        if model in self._used():
            raise InputError(f"{model} is in use; delete its instances first", param="model")
        await self.cancel(model)
        freed_bytes = await self._drop(model)
        if freed_bytes is not None:
            _log.info("deleted what was fetched of %s: %s", model, gigabytes(freed_bytes))
        return freed_bytes

    async def search(self, query: str, limit: int) -> list[HubModel]:
        self._refuse_fetching(from_hub=True)
        return list(await self._fetcher.search(query, limit))

    def _job(self, model: str, layers: Layers, wants: Wants) -> _Job:
        """The fetch that is under way, or a new one. Raises FetchError if there are too many."""
        job = self._jobs.get((model, layers))
        if job is None and len(self._jobs) >= MAX_JOBS:
            raise FetchError(f"{len(self._jobs)} downloads are under way here", remedy="try again when some are done")
        if job is None:
            job = _Job(model, layers, wants, new_info(model, layers))
            self._jobs[model, layers] = job
            self._records.note(job.info)
            job.task = self._tasks.start(self._run(job), f"fetch {model}")
        return job

    def _end_if_alone(self, job: _Job) -> None:
        if not job.watchers and not job.is_pull and job.task is not None:
            job.task.cancel()

    async def _run(self, job: _Job) -> None:
        self.tally.running += 1
        try:
            async with self._turn(job.model):
                self._refuse_fetching(from_hub=False)
                await self._fetch(job)
        except FetchError as exc:
            self.tally.failed[exc.code] += 1
            _log.warning("fetching %s failed: %s", job.model, exc)
            failed = replace(job.info, state=DownloadState.FAILED, reason=str(exc), remedy=exc.remedy)
            self._update(job, replace(failed, bytes_per_s=0.0, eta_s=0.0))
            raise
        except asyncio.CancelledError:
            self._records.forget(job.model)
            raise
        else:
            done = replace(job.info, state=DownloadState.COMPLETED, done_bytes=job.info.total_bytes, eta_s=0.0)
            self._update(job, done)
            if job.is_pull:
                await asyncio.to_thread(self._files.forget_pulls, job.model, job.layers)
            await self._on_change()
        finally:
            self.tally.running -= 1
            if self._jobs.get((job.model, job.layers)) is job:
                del self._jobs[job.model, job.layers]

    async def _fetch(self, job: _Job) -> None:
        """Plan and fetch, and again if sources fail. Raises FetchError."""
        model_dir = await asyncio.to_thread(self._files.model_dir, job.model)
        for attempt in range(MAX_TRIES):
            try:
                while not await self._fetch_as_planned(job, model_dir):
                    _log.info("another peer fetches %s as well, or no longer; planning it again", job.model)
                break
            except FetchError as exc:
                if exc.is_final or attempt == MAX_TRIES - 1:
                    raise
                _log.info("fetching %s: %s; planning it again", job.model, exc)
            except (ModelError, UnknownModelError, OSError) as exc:
                raise FetchError(f"{job.model}: {exc}") from exc
            await asyncio.sleep(RETRY_S)
        if left := size_of_pieces(await asyncio.to_thread(self._files.missing, job.model, job.layers)):
            raise FetchError(f"{gigabytes(left)} of {job.model} did not come")

    async def _fetch_as_planned(self, job: _Job, model_dir: Path) -> bool:
        """Fetch by a plan of now. False if another peer has begun to fetch the same model meanwhile, or has ended
        without it: by a new plan each byte comes from the hub once. Raises FetchError."""
        shares = await self._shares(job)
        if not shares:
            return True
        job.num_plans += 1
        loop = asyncio.get_running_loop()
        until = loop.time() + (PLAN_AGAIN_S if job.num_plans > 1 else 0.0)
        fetching = asyncio.ensure_future(self._fetch_all(job, model_dir, shares))
        try:
            while not fetching.done():
                if loop.time() >= until and self._is_outdated(job):
                    return False
                await _either(fetching, self._membership.changed, PLAN_AGAIN_S)
            fetching.result()
            return True
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)

    async def _fetch_all(self, job: _Job, model_dir: Path, shares: Sequence[Share]) -> None:
        await self._fetcher.fetch(model_dir, shares, _Meter(job, self._update, self.tally).take)

    def _fetched_elsewhere(self, job: _Job) -> frozenset[tuple[str, Layers]]:
        """What other peers fetch of the model now, besides what they fetch for the same reason."""
        return frozenset(
            (owner, None if info.is_whole else info.layers)
            for owner, info in self._membership.view.downloads()
            if info.model == job.model and info.state.is_active and owner != self._membership.own.id
        ) - frozenset(job.wants.items())

    def _is_outdated(self, job: _Job) -> bool:
        """Checks whether others fetch something else than when the plan was made. One that is done changes nothing."""
        now = self._fetched_elsewhere(job)
        completed = {
            owner
            for owner, info in self._membership.view.downloads()
            if info.model == job.model and info.state is DownloadState.COMPLETED
        }
        return any(owner not in completed for owner, _ in job.elsewhere ^ now)

    async def _shares(self, job: _Job) -> list[Share]:
        """What is to be fetched from where, as things are now. Raises FetchError if there is no room, or no source."""
        job.elsewhere = self._fetched_elsewhere(job)
        missing = await asyncio.to_thread(self._files.missing, job.model, job.layers)
        if not missing:
            return []
        pieces = await asyncio.to_thread(self._files.pieces, job.model, job.layers)
        job.here_bytes = size_of_pieces(pieces) - size_of_pieces(missing)
        await self._make_room(job.model, size_of_pieces(missing))
        own = await asyncio.to_thread(self._files.holding, job.model)
        company = {peer_id for peer_id, _ in job.elsewhere}
        if not own.digest:  # no record of a peer names a model that has no card
            company |= {peer.id for peer in self._membership.peers}
        others = [(peer, one) for peer, one in await self._holdings(job.model, company) if one.digest == own.digest]
        own_id = self._membership.own.id
        present = {own_id: own.present, **{peer.id: own.same_files(one) for peer, one in others}}
        readable = {peer.id for peer, _ in others}
        wanted = [*job.wants.items(), *(one for one in job.elsewhere if one[0] in readable)]
        if own.repo and any(minus(spans, _held(present, file)) for file, spans in missing.items()):
            wanted += (await self._through_store(job.model, own.digest)).items()
        wants = {**await asyncio.to_thread(self._pieces_of_all, job.model, wanted), own_id: missing}
        ways = {peer.id: peer for peer in self._ways() if peer.info.files_port}
        planned = fetch_plan(own_id, wants, present, list(ways), self._hub_users(own) if own.repo else ())
        _refuse_sourceless(job.model, planned, self.rules)
        return [
            Share(
                {file: tuple(spans) for file, spans in share.pieces.items()},
                tuple(
                    Source() if one.peer == HUB else self._source(ways[one.peer], is_arriving=one.is_arriving)
                    for one in share.sources
                ),
            )
            for share in planned
        ]

    async def _through_store(self, model: str, digest: str) -> Wants:
        """Let the store's host fetch all of a model from the hub, if there is one and it may, so that other peers copy
        the bytes as they arrive there. Answers what the host wants then. Raises FetchError."""
        host = self.store.remote
        if host is None or host.info.fetches != "hub" or not self.rules.store.may_ask_hub:
            return {}
        wants = pb.PeerLayers(peer=host.id, whole=True)
        try:
            await host.client.pull(pb.PullRequest(model=model, model_digest=digest, wants=[wants]))
        except MeshError as exc:
            raise FetchError(f"the store at {host.info.name} cannot fetch {model}: {exc}") from exc
        await asyncio.to_thread(self._files.touch, model, store=host.id)
        return {host.id: None}

    def _ways(self) -> list[Peer]:
        """The other peers: the store's host first, then by the best measured way."""
        host = self.store.remote
        return sorted(self._membership.peers, key=lambda peer: (peer is not host, *_way_rank(peer)))

    def _pieces_of_all(self, model: str, wanted: Iterable[tuple[str, Layers]]) -> dict[str, Pieces]:
        """By peer id."""
        found: dict[str, dict[str, Spans]] = {}
        for peer_id, layers in wanted:
            pieces = found.setdefault(peer_id, {})
            for file, spans in self._files.pieces(model, layers).items():
                pieces[file] = merged((*pieces.get(file, ()), *spans))
        return dict(found)

    def _hub_users(self, own: Holding) -> list[str]:
        """The peers that may ask the hub for a model: with a model store its host only, unless that is away."""
        own_id, store = self._membership.own.id, self.store
        users = [peer.id for peer in self._membership.peers if peer.info.fetches == "hub"]
        users += [own_id] if self.rules.fetches == "hub" else []
        if not store.may_ask_hub:
            return []
        return [one for one in users if store.host is None or one == store.host.id]

    def _source(self, peer: Peer, *, is_arriving: bool = False) -> Source:
        urls = tuple(f"{self.rules.scheme}://{host}:{peer.info.files_port}" for host in peer.hosts)
        return Source(peer.id, urls, is_arriving)

    async def _holdings(self, model: str, company: Collection[str] = ()) -> list[tuple[Peer, Holding]]:
        """What other peers have of a model, by the best way first; those that do not answer are left out. company: ids
        of peers that have it, though their own records may not say so yet."""
        readable = [peer for peer in self._ways() if peer.info.files_port]
        asked = [peer for peer in readable if peer.info.knows(model) or peer.id in company]
        replies = await asyncio.gather(*(peer.client.describe_files(model) for peer in asked), return_exceptions=True)
        found = []
        for peer, reply in zip(asked, replies, strict=True):
            if isinstance(reply, MeshError):
                _log.info("peer %s does not say what it has of %s: %s", peer.info.name, model, reply)
            elif isinstance(reply, BaseException):
                raise reply
            elif reply.found:
                found.append((peer, holding_from_proto(reply)))
        return found

    # room

    def _used(self) -> set[str]:
        """Models that an instance of the mesh uses."""
        return {instance.plan.model for _, instance in self._membership.view.records_of_instances()}

    def _is_idle(self, model: str) -> bool:
        """Whether no instance uses the model and nothing fetches it."""
        return model not in self._used() and not any(job.model == model for job in self._jobs.values())

    def _may_evict(self, model: FetchedModel) -> bool:
        may_go = (self.rules.evict_pinned or not model.is_pinned) and not self.rules.store.is_here
        return may_go and self._is_idle(model.name)

    async def sweep_if_changed(self) -> None:
        """Sweep at the first call, and when instances, or the models of the store, are others than at the last."""
        host = self.store.remote
        state = self._used(), None if host is None else (host.id, host.info.models, host.info.partial_models)
        if state != self._swept:
            self._swept = state
            await self.sweep()

    async def sweep(self, *, keeps_recent: bool = True) -> bool:
        """Delete staged copies that nothing uses: of models that the store has deleted, and what is over the room for
        recent ones. keeps_recent: False deletes them all. Says whether any was deleted."""
        staged = [one for one in await asyncio.to_thread(self._files.fetched) if one.store]
        lost = {one.name for one in staged if not keeps_recent or await self.store.has_lost(one.store, one.name)}
        copies = [
            StagedCopy(one.name, one.num_bytes, one.used_at, not self._is_idle(one.name), one.name in lost)
            for one in staged
        ]
        gone = surplus(copies, self.rules.store.keep_bytes, time.time())
        for model in gone:
            if self._is_idle(model):  # still, after the ones before it were deleted
                _log.info("deleting the staged copy of %s, which nothing uses", model)
                try:
                    await self._drop(model)
                except FetchError as exc:
                    _log.warning("the staged copy of %s cannot be deleted: %s", model, exc)
        return bool(gone)

    async def _drop(self, model: str) -> int | None:
        self._records.forget(model)
        async with self._turn(model):
            freed_bytes = await asyncio.to_thread(self._files.delete, model)
        if freed_bytes is not None:
            await self._on_change()
        return freed_bytes

    async def _make_room(self, model: str, num_bytes: int) -> None:
        """Delete what was not used for longest until there is room. Raises FetchError if there cannot be."""
        models = await asyncio.to_thread(self._files.fetched)
        while self._files.room(self.rules.max_bytes, models) < num_bytes:
            stale = next((one for one in models if one.name != model and self._may_evict(one)), None)
            if stale is None:
                raise self._no_room(model, num_bytes, models)
            _log.warning("deleting %s, which nothing uses, to make room for %s", stale.name, model)
            await self._drop(stale.name)
            models = [one for one in models if one is not stale]

    def _no_room(self, model: str, num_bytes: int, models: Sequence[FetchedModel]) -> FetchError:
        room, cap = self._files.room(self.rules.max_bytes, models), self.rules.max_bytes
        what = f"{model} needs {gigabytes(num_bytes)} here, and there is room for {gigabytes(room)}"
        if cap is not None and room < self._files.room(None, models):
            what += f": models may take {gigabytes(cap)} (--models-max-size)"
        pinned = ", or allow to delete models that were pulled by name (--evict-pinned)"
        keeps = any(one.is_pinned for one in models) and not self.rules.evict_pinned
        return FetchError(what, remedy=f"delete models with `exo-mesh rm`{pinned if keeps else ''}", is_final=True)

    def _update(self, job: _Job, info: DownloadInfo) -> None:
        job.info = info
        job.changed.beat()
        self._records.note(info)

    def _turn(self, model: str) -> asyncio.Lock:
        return self._turns.setdefault(model, asyncio.Lock())


class _Meter:
    """Turns the progress of one fetch into what is told of it. Bytes by source go on from an earlier try."""

    def __init__(self, job: _Job, update: Callable[[_Job, DownloadInfo], None], tally: DownloadTally) -> None:
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


def _way_rank(peer: Peer) -> tuple[float, float, str]:
    """The best measured way first."""
    used = peer.paths.get(peer.client.address)
    speed = used.mb_per_s if used is not None and used.mb_per_s else 0.0
    return -speed, peer.rtt_ms if peer.rtt_ms is not None else float("inf"), peer.id


def _held(present: Mapping[str, Pieces], file: str) -> Spans:
    """The bytes of a file that any peer has."""
    return merged([span for pieces in present.values() for span in pieces.get(file, ())])


def _refuse_sourceless(model: str, planned: Sequence[PlannedShare], rules: FetchRules) -> None:
    lost_bytes = sum(size_of_pieces(share.pieces) for share in planned if not share.sources)
    if lost_bytes:
        why, remedy = "and it is from no hub", "start a peer that has them"
        if rules.fetches == "peers":
            why, remedy = "and this node asks no hub (--offline)", f"{remedy}, or this node without --offline"
        elif not rules.store.may_ask_hub:
            why = "and what the model store does not have is not fetched (--no-store-fallback)"
            remedy = f"{remedy}, or fetch the model into the store: POST /store/models/{model}/download"
        raise FetchError(f"{gigabytes(lost_bytes)} of {model} are on no live peer, {why}", remedy=remedy)


def _raise_outcome(job: _Job) -> None:
    assert job.task is not None, "it has been started"
    if job.task.cancelled():
        raise FetchError(f"fetching {job.model} was cancelled", remedy="start it again", is_final=True)
    job.task.result()


def _is_model(model_dir: Path) -> bool:
    return (model_dir / "config.json").exists() or (model_dir / MANIFEST_FILE).exists()


async def _either(task: asyncio.Future[None], changed: ChangeSignal, timeout_s: float) -> None:
    """Wait for the end of a task, a change, or the time."""
    waiting: Coroutine[Any, Any, bool] = changed.wait(timeout_s)
    waiter = asyncio.ensure_future(waiting)
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)

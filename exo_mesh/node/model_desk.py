"""Finds, downloads and deletes models, for callers of this node's API and for peers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from exo_mesh.base.printable import quoted
from exo_mesh.base.tasks import Bound
from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.download import DownloadEntry
from exo_mesh.domain.model import ModelCard
from exo_mesh.errors import (
    FetchError,
    InputError,
    MeshError,
    ModelError,
    NotFetchedError,
    OpenMeshError,
    PendingPlacementError,
    PlacementError,
    UnknownModelError,
)
from exo_mesh.mesh.membership.naming import peer_called
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.cards.companions import companions_of
from exo_mesh.models.cards.from_checkpoint import card_from_checkpoint
from exo_mesh.models.cards.shelf import CardShelf
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.downloads.service import Downloads
from exo_mesh.models.fetcher.wire import FILES_ONLY, HubModel
from exo_mesh.models.file_codec import wants_from_proto, wants_to_proto
from exo_mesh.models.local_files import Wants
from exo_mesh.models.names import ModelReference
from exo_mesh.models.profiles import facts_in
from exo_mesh.rings.placing.planner import Planner
from exo_mesh.rings.placing.previews import with_peer_ids
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.weights.model_files import read_json
from exo_mesh.wire.proto import control_pb2 as pb

_log = logging.getLogger(__name__)

MAIN = "main"

MAX_ASKED = 32
"""Most lookups and starts of downloads that peers may run on this node at once; each may take minutes."""

TOLD_S = 10.0
"""Longest wait until this node knows of a model that a peer has received."""


class ModelDesk:
    """Implements the model calls of MeshService and of peers."""

    def __init__(
        self,
        membership: Membership,
        catalogue: Catalogue,
        downloads: Downloads,
        planner: Planner,
        shelf: CardShelf,
        *,
        obeys_peers: bool = True,
    ) -> None:
        """obeys_peers: this node also uses the hub when a peer asks. In an open mesh a stranger could fill its disk."""
        self._membership = membership
        self._catalogue = catalogue
        self._downloads = downloads
        self._planner = planner
        self._shelf = shelf
        self._obeys_peers = obeys_peers
        self._asked = Bound(MAX_ASKED, "requests of peers to fetch models run here")

    # for users

    async def find(self, name: str, *, may_download: bool, is_asked_for: bool = False) -> ModelCard:
        """The card of a model in the mesh or, if no peer has it, from its headers on the hub.

        Raises UnknownModelError and FetchError. may_download: allow requests to the hub; without it, a model that may
        be on the hub raises NotFetchedError. is_asked_for: the model was explicitly requested for the model store, so
        --no-store-fallback does not apply.
        """
        try:
            return await self._catalogue.card(name)
        except UnknownModelError as exc:
            unknown = exc
            meant = await self._catalogue.reference(name)
            if not meant.repo or not self._may_resolve(is_asked_for):
                raise
            if not may_download:
                if "/" not in meant.repo:  # more likely a mistyped name than a model of the hub
                    raise
                raise NotFetchedError(str(exc), param="model") from exc
        repo = f"{meant.repo}:{meant.quant}" if meant.quant else meant.repo
        try:
            await self._resolve(meant.in_mesh, repo, meant.revision or MAIN)
        except (UnknownModelError, FetchError) as of_hub:
            if "/" in meant.repo:
                raise
            raise UnknownModelError(f"{unknown}; at the hub: {of_hub}", param="model") from of_hub
        try:
            return await self._catalogue.card(meant.in_mesh)
        except UnknownModelError as exc:
            if not meant.quant:
                raise
            raise ModelError(
                f"the files of {name} were downloaded for other programs, without what exo-mesh needs to run them; "
                f"delete them with `exo-mesh rm {meant.in_mesh}` and try again"
            ) from exc

    def _may_resolve(self, is_asked_for: bool) -> bool:
        may_ask = is_asked_for or self._downloads.store.may_ask_hub
        return may_ask and bool(self._downloads.rules.fetches)

    async def _resolve(self, name: str, repo: str, revision: str) -> None:
        """Downloads a model's headers from the hub: to the store's host if that is another node, else to this one."""
        host = self._downloads.store.remote
        if host is None:
            allows_code = self._shelf.allows_code(name)
            await self._downloads.resolve(name, repo, revision, allows_code=allows_code)
            return
        await host.client.introduce(name, "", repo=repo, revision=revision)
        deadline = asyncio.get_running_loop().time() + TOLD_S
        while not self._catalogue.holders(name):
            if asyncio.get_running_loop().time() > deadline:
                raise FetchError(
                    f"the store at {host.info.name} has not published {name} within {TOLD_S:g} s", remedy="try again"
                )
            await self._membership.changed.wait(1.0)

    async def add_card(self, repo: str) -> ModelCard:
        """Makes a custom card from a model's config and headers; returns the checkpoint's card. Raises as `find`."""
        card = await self.find(repo, may_download=True)
        await self._downloads.introduce(card.name, card.digest)
        model_dir = await asyncio.to_thread(self._catalogue.local_dir, card.name)
        config = await asyncio.to_thread(read_json, model_dir / "config.json")
        await self._shelf.add_card(card_from_checkpoint(card, config, await asyncio.to_thread(facts_in, model_dir)))
        return card

    async def delete_card(self, name: str) -> bool:
        deleted = await self._shelf.delete_card(name)
        if not deleted and (near := self._shelf.near_custom(name)):
            raise UnknownModelError(f"there is no custom card {name}; similar names: {', '.join(near)}", param="id")
        return deleted

    def entries(self) -> list[DownloadEntry]:
        return self._downloads.entries()

    async def start(
        self, model: str, *, peers: Sequence[str] = (), whole: bool = False, is_asked_for: bool = False
    ) -> list[DownloadEntry]:
        """See MeshService.start_download; is_asked_for: see `find`."""
        meant = await self._catalogue.reference(model)
        try:
            card = await self.find(model, may_download=True, is_asked_for=is_asked_for)
        except ModelError as exc:
            if not meant.quant:
                raise
            _log.info("%s cannot be run here, so it is only downloaded: %s", model, exc)
            return await self._start_gguf(meant, peers)
        await self._start_companions(card.name, peers)
        return await self._start_model(card, peers, whole=whole)

    async def _start_companions(self, model: str, peers: Sequence[str]) -> None:
        """Starts downloads of the repositories that the model's card names. Raises MeshError if a required one
        fails."""
        described = self._shelf.card(model)
        for one in [] if described is None else companions_of(described):
            try:
                companion = await self.find(one.repo, may_download=True)
                await self._start_model(companion, peers, whole=True)
            except MeshError as exc:
                what = f"{one.repo} ({one.field} of the card of {model}) cannot be downloaded: {exc}"
                if one.is_required:
                    raise FetchError(what, remedy=getattr(exc, "remedy", ""), is_final=True) from exc
                _log.warning("%s; the model works without it", what)

    async def _start_model(self, card: ModelCard, peers: Sequence[str], *, whole: bool) -> list[DownloadEntry]:
        wants, hub_user = self._with_hub_user(card.name, await self._wants(card, peers, whole=whole))
        # every peer needs the headers before a peer can wait for bytes that arrive at another one
        await _first_failure_if_all(self._introduce_at(peer_id, card) for peer_id in wants)
        await _first_failure_if_all(
            self._pull_at(peer_id, card.name, card.digest, wants, hub_user) for peer_id in wants
        )
        return self._downloads.begun(card.name, wants)

    def _with_hub_user(self, model: str, wants: Wants) -> tuple[Wants, str]:
        """The wants, and which peer alone uses the hub; "" means each that may.

        In an open mesh the others do not use the hub for this node. If no peer has the whole model, this node fetches
        it, and the others copy their parts as they arrive here.
        """
        own_id = self._membership.own.id
        if self._obeys_peers or set(wants) == {own_id}:
            return wants, ""
        if any(model in peer.models for peer in self._membership.view.peers()):
            return wants, own_id
        return {**wants, own_id: None}, own_id

    async def _start_gguf(self, meant: ModelReference, peers: Sequence[str]) -> list[DownloadEntry]:
        """Starts the download of all files of one quantisation to the named peers, or else to this node.

        For GGUF files that cannot be run: they have no card, so they cannot be divided into layers.
        """
        known = self._membership.view.peers()
        wants: Wants = dict.fromkeys([_peer_named(one, known) for one in peers] or [self._membership.own.id])
        name, origin = meant.in_mesh, (f"{meant.repo}:{meant.quant}:{FILES_ONLY}", meant.revision or MAIN)
        # every peer needs the sizes before a peer can wait for bytes that arrive at another one
        await _first_failure_if_all(self._resolve_at(peer_id, name, *origin) for peer_id in wants)
        await _first_failure_if_all(self._pull_at(peer_id, name, "", wants) for peer_id in wants)
        return self._downloads.begun(name, wants)

    async def _resolve_at(self, peer_id: str, name: str, repo: str, revision: str) -> None:
        peer = self._membership.peer(peer_id)
        if peer_id == self._membership.own.id:
            await self._downloads.resolve(name, repo, revision)
        elif peer is not None:
            await peer.client.introduce(name, "", repo=repo, revision=revision)

    async def cancel(self, peer_id: str, model: str) -> bool:
        return await self._drop_at(peer_id, await self._first_name(model), files=False) is not None

    async def delete(self, name: str, *, peers: Sequence[str] = ()) -> dict[str, int]:
        """Deletes the downloaded files of a model; returns the freed bytes by peer id.

        Files in the model store are deleted only if its host is among `peers`. Raises InputError if an instance uses
        the model.
        """
        name = await self._first_name(name)
        host = self._downloads.store.host
        asked = self._peers_named(peers) if peers else self._peers_named((), but=None if host is None else host.id)
        return await self._drop_at_all(asked, name)

    async def purge_staged(self, peers: Sequence[str] = ()) -> list[str]:
        """Deletes the unused staged copies; returns the ids of the peers that had any."""
        return list(await self._drop_at_all(self._peers_named(peers), "", staged=True))

    def _peers_named(self, names: Sequence[str], *, but: str | None = None) -> list[str]:
        """The ids of the named peers; if none is named, of all peers except `but`. Raises InputError."""
        known = self._membership.view.peers()
        return [_peer_named(one, known) for one in names] or [peer.id for peer in known if peer.id != but]

    async def _drop_at_all(self, asked: Sequence[str], model: str, *, staged: bool = False) -> dict[str, int]:
        """Deletes files at these peers; returns the freed bytes by peer that had any. Raises the first failure if no
        peer deleted anything."""
        answers = await asyncio.gather(
            *(self._drop_at(peer_id, model, files=True, staged=staged) for peer_id in asked), return_exceptions=True
        )
        freed = {peer_id: answer for peer_id, answer in zip(asked, answers, strict=True) if isinstance(answer, int)}
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures and not freed:
            raise failures[0]
        self._report_refusals(asked, answers, model, freed)
        return freed

    def _report_refusals(
        self, asked: Sequence[str], answers: Sequence[object], model: str, freed: Iterable[str]
    ) -> None:
        """Raises OpenMeshError if files were deleted at some peers, and others that have them refused."""
        known = {peer.id: peer for peer in self._membership.view.peers()}
        refusals = {
            known[peer_id].name: answer
            for peer_id, answer in zip(asked, answers, strict=True)
            if isinstance(answer, OpenMeshError) and peer_id in known and (not model or known[peer_id].knows(model))
        }
        if refusals:
            done = ", ".join(known[peer_id].name for peer_id in freed if peer_id in known)
            raise OpenMeshError(f"deleted at {done}, not at {', '.join(refusals)}: {next(iter(refusals.values()))}")

    async def _first_name(self, name: str) -> str:
        """The mesh's name of a model; `name` itself if the model is unknown or cannot be used."""
        try:
            return (await self._catalogue.card(name)).name
        except MeshError:
            with contextlib.suppress(MeshError):
                meant = await self._catalogue.reference(name)
                return meant.in_mesh if meant.quant else name
            return name

    async def search(self, query: str, limit: int) -> list[HubModel]:
        return await self._downloads.search(query, limit)

    async def storage(self) -> dict[str, Any]:
        return await self._downloads.room.storage()

    async def _wants(self, card: ModelCard, peers: Sequence[str], *, whole: bool) -> Wants:
        """The layers that each peer downloads: by the plan for a request, over the named peers if any.

        With whole: None (all files) for the named peers or this node. Raises PlacementError with the arithmetic.
        """
        known = self._membership.view.peers()
        named = [_peer_named(one, known) for one in peers]
        if whole:
            return dict.fromkeys(named or [self._membership.own.id])
        spec = InstanceSpec(card.name)
        if named:
            others = tuple(peer.id for peer in known if peer.id not in named)
            spec = InstanceSpec(card.name, min_peers=len(named), exclude_peers=others)
        spec = with_peer_ids(spec, known)
        try:
            plan = await self._planner.propose(card, spec)
        except PlacementError as exc:
            raise await self._planner.judge(card, spec, exc) from exc
        return {peer_id: (stage.shard.start, stage.shard.stop) for stage in plan.stages for peer_id in stage.peers}

    async def _introduce_at(self, peer_id: str, card: ModelCard) -> None:
        peer = self._membership.peer(peer_id)
        if peer_id == self._membership.own.id:
            await self._downloads.introduce(card.name, card.digest)
        elif peer is not None:
            await peer.client.introduce(card.name, card.digest)

    async def _pull_at(self, peer_id: str, name: str, digest: str, wants: Wants, hub_user: str = "") -> None:
        if peer_id == self._membership.own.id:
            await self._downloads.pull(name, digest, wants, hub_user=hub_user)
            return
        peer = self._membership.peer(peer_id)
        if peer is None:
            raise PendingPlacementError(f"peer {peer_id[:8]} has left the mesh")
        request = pb.PullRequest(model=name, model_digest=digest, wants=wants_to_proto(wants), hub_user=hub_user)
        await peer.client.pull(request)

    async def _drop_at(self, peer_id: str, model: str, *, files: bool, staged: bool = False) -> int | None:
        """Deletes files or cancels a download at a peer (see DropModel); returns the freed bytes, None without any."""
        if peer_id == self._membership.own.id:
            return await self._drop_here(model, files=files, staged=staged)
        peer = self._membership.peer(peer_id)
        return None if peer is None else await peer.client.drop_model(model, files=files, staged=staged)

    async def _drop_here(self, model: str, *, files: bool, staged: bool) -> int | None:
        if files and not staged:
            return await self._downloads.delete(model)
        work = self._downloads.room.sweep(keeps_recent=False) if staged else self._downloads.cancel(model)
        return 0 if await work else None

    # for peers

    async def answer_introduce(self, request: pb.IntroduceRequest) -> pb.IntroduceReply:
        with self._asked.taken():
            if request.repo:
                self._require_hub(request.repo.removesuffix(f":{FILES_ONLY}"))
                code = self._shelf.allows_code(request.model)
                await _with_remedy(
                    self._downloads.resolve(request.model, request.repo, request.revision, allows_code=code)
                )
            else:
                await _with_remedy(self._downloads.introduce(request.model, request.model_digest))
        return pb.IntroduceReply()

    async def answer_describe_files(self, request: pb.DescribeFilesRequest) -> pb.DescribeFilesReply:
        return await self._downloads.describe(request.model)

    async def answer_pull(self, request: pb.PullRequest) -> pb.PullReply:
        wants = wants_from_proto(request.wants)
        with self._asked.taken():
            await _with_remedy(
                self._downloads.pull(
                    request.model,
                    request.model_digest,
                    wants,
                    from_hub=self._obeys_peers,
                    hub_user=request.hub_user,
                )
            )
        return pb.PullReply()

    def _require_hub(self, repo: str) -> None:
        """Raises OpenMeshError in a mesh where peers have no right to make this node use the hub."""
        if not self._obeys_peers:
            raise OpenMeshError(
                f"this mesh is open, so {self._membership.own.name} downloads {repo} from the hub for no peer; "
                f"type `exo-mesh pull {repo}` on that machine, or start its node with --open-admin"
            )

    async def answer_drop(self, request: pb.DropModelRequest) -> pb.DropModelReply:
        freed = await self._drop_here(request.model, files=request.files, staged=request.staged)
        return pb.DropModelReply(found=freed is not None, freed_bytes=freed or 0)


async def _first_failure_if_all(work: Iterable[Awaitable[None]]) -> None:
    """Awaits all concurrently. Raises the first failure if none succeeded."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    failures = [one for one in outcomes if isinstance(one, BaseException)]
    if failures and len(failures) == len(outcomes):
        raise failures[0]


async def _with_remedy(work: Awaitable[None]) -> None:
    """Awaits the work; puts the remedy of a FetchError into its text, because only the text reaches a peer."""
    try:
        await work
    except FetchError as exc:
        raise FetchError(exc.full) from exc


def _peer_named(name: str, peers: Sequence[PeerInfo]) -> str:
    """Returns the id of a peer; see peer_called. Raises InputError."""
    if (found := peer_called(name, peers, "peers")) is not None:
        return found.id
    known = ", ".join(f"{peer.name} ({peer.id[:8]})" for peer in peers)
    raise InputError(f"no peer is called {quoted(name)}; there are: {known}", param="peers")

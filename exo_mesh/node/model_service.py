"""Lists, finds, downloads and deletes models, for callers of this node's API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from exo_mesh.domain.download import DownloadEntry
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.peer_names import peers_named
from exo_mesh.errors import (
    FetchError,
    MeshError,
    ModelError,
    NotFetchedError,
    OpenMeshError,
    PlacementError,
    UnknownModelError,
)
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.calls import drop_model, introduce, pull
from exo_mesh.models.cards.toml_card import TomlCard
from exo_mesh.models.entry import ModelEntry
from exo_mesh.models.fetcher.wire import FILES_ONLY, HubModel
from exo_mesh.models.local_files import Wants
from exo_mesh.models.names import ModelReference
from exo_mesh.models.profiles import facts_in
from exo_mesh.models.wiring import ModelParts
from exo_mesh.node.model_list import listed_model
from exo_mesh.rings.placing.previews import with_peer_ids
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.placing.wiring import InstanceParts
from exo_mesh.text.template import ChatTemplate
from exo_mesh.weights.model_files import read_json

_log = logging.getLogger(__name__)

MAIN = "main"

TOLD_S = 10.0
"""Longest wait until this node knows of a model that a peer has received."""


class ModelService:
    """The models of the mesh. All failures are MeshErrors. peer, peers: see Membership.peer_named."""

    def __init__(
        self,
        membership: Membership,
        models: ModelParts,
        owning: InstanceParts,
        *,
        obeys_peers: bool = True,
        engines_for: Callable[[str], tuple[str, ...]] = lambda architecture: (),
    ) -> None:
        """engines_for: the engines that run an architecture, usable here or not. obeys_peers: this node also uses the
        hub when a peer asks. In an open mesh a stranger could fill its disk."""
        self._membership = membership
        self._models = models
        self._catalogue = models.catalogue
        self._downloads = models.downloads
        self._shelf = models.shelf
        self._instances = owning.instances
        self._planner = owning.planner
        self._obeys_peers = obeys_peers
        self._engines_for = engines_for

    # what there is

    def all(self) -> list[ModelEntry]:
        """Every model that a live peer has on disk, sorted by name."""
        known = self._catalogue.known_card
        return [self._entry(name, peers, known(name)) for name, peers in self._catalogue.names().items()]

    def _entry(self, name: str, peers: Sequence[str], card: ModelCard) -> ModelEntry:
        return listed_model(name, peers, card, self._models, self._instances)

    async def named(self, name: str) -> ModelEntry:
        """A model on a live peer's disk, by hub id or alias. Raises UnknownModelError with similar names, and
        ModelError if only this node has the model and cannot use it."""
        card = await self._catalogue.card(name)
        known = next((entry for entry in self.all() if entry.name == card.name), None)
        return known or self._entry(card.name, (self._membership.own.id,), card)

    async def at(self, path: Path) -> str:
        """The name of the model in a directory of this machine. Raises UnknownModelError if the node does not list
        it."""
        return await self._catalogue.name_at(path)

    def cards_without_files(self) -> list[TomlCard]:
        """The cards of models that no live peer has, sorted by id."""
        there = self._catalogue.names()
        return [card for card_id, card in sorted(self._shelf.cards().items()) if card_id not in there]

    def engines_of(self, card: TomlCard) -> tuple[str, ...]:
        """The engines that run the architecture of a card; empty if the card does not name it."""
        return self._engines_for(card.architecture) if card.architecture else ()

    def unusable(self) -> dict[str, str]:
        """The models on this machine that cannot be used: reason by name."""
        return self._catalogue.unusable

    def is_reading(self) -> bool:
        """Whether this node still reads its disk, so that models may be missing in the lists."""
        return self._catalogue.is_reading

    async def text_files(self, name: str) -> Path:
        """A local directory with the model's tokenizer.json, tokenizer_config.json, chat template and configs, copied
        from a peer if this one does not have the model."""
        return await self._models.texts.directory(name)

    def note_template(self, name: str, template: ChatTemplate) -> None:
        """Takes what a renderer has found about a model's chat template, for the list of models."""
        self._models.profiles.note_tried(name, template)

    # for users

    async def find(self, name: str, *, may_download: bool) -> ModelEntry:
        """Like `named`, but downloads config, tokenizer and headers from the hub if no peer has the model.

        Also raises FetchError and InputError, and NotFetchedError where may_download is False.
        """
        card = await self.find_card(name, may_download=may_download)
        self._shelf.runner_of(card.name)
        return await self.named(card.name)

    async def find_card(self, name: str, *, may_download: bool, is_asked_for: bool = False) -> ModelCard:
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
            if "/" in name:
                raise
            text = f"{unknown}; at the hub: {of_hub}"
            if "/" in meant.repo and isinstance(of_hub, FetchError):  # a model that a card names, and so is there
                raise FetchError(text, remedy=of_hub.remedy, is_final=of_hub.is_final) from of_hub
            raise UnknownModelError(text, param="model") from of_hub
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
        at = self._membership.own.id if host is None else host.id
        await introduce(self._membership.calls, at, name, repo=repo, revision=revision)
        if host is None:
            return
        deadline = asyncio.get_running_loop().time() + TOLD_S
        while not self._catalogue.holders(name):
            if asyncio.get_running_loop().time() > deadline:
                raise FetchError(
                    f"the store at {host.info.name} has not published {name} within {TOLD_S:g} s", remedy="try again"
                )
            await self._membership.changed.wait(1.0)

    async def add_card(self, repo: str) -> ModelEntry:
        """Makes a card from the config and headers of a hub repository, for all peers. Raises as `find`."""
        from exo_mesh.models.cards.from_checkpoint import card_from_checkpoint

        card = await self.find_card(repo, may_download=True)
        await self._downloads.introduce(card.name, card.digest)
        model_dir = await asyncio.to_thread(self._catalogue.local_dir, card.name)
        config = await asyncio.to_thread(read_json, model_dir / "config.json")
        await self._shelf.add_card(card_from_checkpoint(card, config, await asyncio.to_thread(facts_in, model_dir)))
        return await self.named(card.name)

    async def delete_card(self, name: str) -> bool:
        """Deletes a card that add_card made, at all peers; False if there is none."""
        deleted = await self._shelf.delete_card(name)
        if not deleted and (near := self._shelf.near_custom(name)):
            raise UnknownModelError(f"there is no custom card {name}; similar names: {', '.join(near)}", param="id")
        return deleted

    def downloads(self) -> list[DownloadEntry]:
        """The current and recently ended downloads of all peers, by model and peer."""
        return self._downloads.entries()

    async def start_download(
        self, model: str, *, peers: Sequence[str] = (), whole: bool = False, is_asked_for: bool = False
    ) -> list[DownloadEntry]:
        """Starts downloads of a model without placing it, and pins the files.

        By default each peer gets its layers of the plan that a request would make; with `whole` the named peers, or
        else this one, get all files. Returns the downloads that this node knows to have started. is_asked_for: see
        find_card. Raises PlacementError with the arithmetic, and FetchError.
        """
        meant = await self._catalogue.reference(model)
        try:
            card = await self.find_card(model, may_download=True, is_asked_for=is_asked_for)
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
        from exo_mesh.models.cards.companions import companions_of

        described = self._shelf.card(model)
        for one in [] if described is None else companions_of(described):
            try:
                companion = await self.find_card(one.repo, may_download=True)
                await self._start_model(companion, peers, whole=True)
            except MeshError as exc:
                what = f"{one.repo} ({one.field} of the card of {model}) cannot be downloaded: {exc}"
                if one.is_required:
                    raise FetchError(what, remedy=getattr(exc, "remedy", ""), is_final=True) from exc
                _log.warning("%s; the model works without it", what)

    async def _start_model(self, card: ModelCard, peers: Sequence[str], *, whole: bool) -> list[DownloadEntry]:
        wants, hub_user = self._with_hub_user(card.name, await self._wants(card, peers, whole=whole))
        # every peer needs the headers before a peer can wait for bytes that arrive at another one
        calls = self._membership.calls
        await _first_failure_if_all(introduce(calls, peer_id, card.name, card.digest) for peer_id in wants)
        await _first_failure_if_all(pull(calls, peer_id, card.name, card.digest, wants, hub_user) for peer_id in wants)
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
        wants: Wants = dict.fromkeys(self._named(peers) or [self._membership.own.id])
        calls, name, revision = self._membership.calls, meant.in_mesh, meant.revision or MAIN
        repo = f"{meant.repo}:{meant.quant}:{FILES_ONLY}"
        # every peer needs the sizes before a peer can wait for bytes that arrive at another one
        await _first_failure_if_all(introduce(calls, peer_id, name, repo=repo, revision=revision) for peer_id in wants)
        await _first_failure_if_all(pull(calls, peer_id, name, "", wants) for peer_id in wants)
        return self._downloads.begun(name, wants)

    async def cancel_download(self, peer: str, model: str) -> bool:
        """Cancels a download at a peer, or forgets a failed one; keeps the downloaded part. False if there is none."""
        peer_id = self._membership.peer_named(peer, "node").id
        return await self._drop_at(peer_id, await self._first_name(model), files=False) is not None

    async def delete(self, name: str, *, peers: Sequence[str] = ()) -> dict[str, int]:
        """Deletes the downloaded files of a model; returns the freed bytes by peer id.

        Files in the model store are deleted only if its host is among `peers`. Raises InputError if an instance uses
        the model.
        """
        name = await self._first_name(name)
        host = self._downloads.store.host
        everywhere = (peer.id for peer in self._membership.view.peers() if host is None or peer.id != host.id)
        asked = self._named(peers) or list(everywhere)
        return await self._drop_at_all(asked, name)

    async def purge_staged(self, peers: Sequence[str] = ()) -> list[str]:
        """Deletes the unused staged copies; returns the ids of the peers that had any."""
        asked = self._named(peers) or [peer.id for peer in self._membership.view.peers()]
        return list(await self._drop_at_all(asked, "", staged=True))

    def _named(self, peers: Sequence[str]) -> list[str]:
        """The ids of the named peers, each once. Raises as peers_named."""
        return [peer.id for peer in peers_named(peers, self._membership.view.peers())]

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
        """Searches the hub for models. Raises FetchError."""
        return await self._downloads.search(query, limit)

    async def storage(self) -> dict[str, Any]:
        """The disk use of the models that this node downloaded: {"path", "total_bytes", "free_bytes", "floor_bytes",
        "max_bytes", "used_bytes", "models": [{"name", "bytes", "whole", "pinned", "staged", "used_at", "in_use"}]}."""
        return await self._downloads.room.storage()

    async def _wants(self, card: ModelCard, peers: Sequence[str], *, whole: bool) -> Wants:
        """The layers that each peer downloads: by the plan for a request, over the named peers if any.

        With whole: None (all files) for the named peers or this node. Raises PlacementError with the arithmetic.
        """
        known = self._membership.view.peers()
        named = self._named(peers)
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

    async def _drop_at(self, peer_id: str, model: str, *, files: bool, staged: bool = False) -> int | None:
        """See calls.drop_model; None for a peer that is gone."""
        if not self._membership.is_alive(peer_id):
            return None
        return await drop_model(self._membership.calls, peer_id, model, files=files, staged=staged)


async def _first_failure_if_all(work: Iterable[Awaitable[None]]) -> None:
    """Awaits all concurrently. Raises the first failure if none succeeded."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    failures = [one for one in outcomes if isinstance(one, BaseException)]
    if failures and len(failures) == len(outcomes):
        raise failures[0]

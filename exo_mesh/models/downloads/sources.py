"""Chooses where the bytes of a model come from: which peers have them, which peers also fetch them, and the plan."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from exo_mesh.domain.download import DownloadState
from exo_mesh.domain.fetch_plan import HUB, PlannedShare, fetch_plan
from exo_mesh.domain.footprint import gigabytes
from exo_mesh.domain.spans import Pieces, Spans, merged, minus
from exo_mesh.errors import FetchError, MeshError
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.calls import describe_files, pull
from exo_mesh.models.downloads.rules import FetchRules
from exo_mesh.models.fetcher.wire import Share, Source
from exo_mesh.models.local_files import Holding, Layers, LocalFiles, Wants, size_of_pieces
from exo_mesh.models.mesh_store import MeshStore

_log = logging.getLogger(__name__)

OtherFetches = frozenset[tuple[str, Layers]]
"""(peer id, layers) of the fetches of one model by other peers."""


class FetchNeed(msgspec.Struct, frozen=True):
    """What this node must have of a model. wants: of all peers that fetch the model for the same reason. from_hub: this
    node may use the hub for it. hub_user: the only peer that does, "": each that may."""

    model: str
    layers: Layers
    wants: Wants
    from_hub: bool = True
    hub_user: str = ""


class ModelSources:
    """Asks peers which bytes they have, and plans which peer fetches what from where."""

    def __init__(self, membership: Membership, files: LocalFiles, rules: FetchRules, store: MeshStore) -> None:
        self._membership = membership
        self._files = files
        self.rules = rules
        self.store = store

    def source(self, peer: Peer, *, is_arriving: bool = False) -> Source:
        urls = tuple(f"{self.rules.scheme}://{host}:{peer.info.files_port}" for host in peer.hosts)
        return Source(peer.id, urls, is_arriving)

    @property
    def trusts_peers(self) -> bool:
        """Whether what peers have found about files counts here: in a closed mesh all have its secret."""
        return self.rules.scheme == "https"

    async def holdings(self, model: str, company: Collection[str] = ()) -> list[tuple[Peer, Holding]]:
        """Returns what other peers have of a model, the best path first, without peers that do not answer. company: ids
        of peers that have the model although their records may not list it yet."""
        readable = [peer for peer in self._ways() if peer.info.files_port]
        asked = [peer for peer in readable if peer.info.knows(model) or peer.id in company]
        questions = (describe_files(self._membership.calls, peer.id, model) for peer in asked)
        replies = await asyncio.gather(*questions, return_exceptions=True)
        found = []
        for peer, reply in zip(asked, replies, strict=True):
            if isinstance(reply, MeshError):
                _log.info("peer %s did not list its files of %s: %s", peer.info.name, model, reply)
            elif isinstance(reply, BaseException):
                raise reply
            elif reply is not None:
                found.append((peer, reply))
        return found

    def hub(self, own: Holding) -> list[Source]:
        """The hub, if the model is from there and this node may use it."""
        return [Source()] if own.repo and self._membership.own.id in self._hub_users(FetchNeed("", None, {})) else []

    def is_fetching_elsewhere(self, model: str) -> dict[str, bool]:
        """Returns for the other peers with a download of the model whether bytes of it are still missing there."""
        own_id, downloads = self._membership.own.id, self._membership.view.downloads()
        return {owner: info.is_fetching for owner, info in downloads if info.model == model and owner != own_id}

    def fetched_elsewhere(self, need: FetchNeed) -> OtherFetches:
        """Returns what other peers fetch of the model now, without fetches for the same reason as this one."""
        return frozenset(
            (owner, None if info.is_whole else info.layers)
            for owner, info in self._membership.view.downloads()
            if info.model == need.model and info.state.is_active and owner != self._membership.own.id
        ) - frozenset(need.wants.items())

    def is_outdated(self, need: FetchNeed, elsewhere: OtherFetches) -> bool:
        """Checks whether other peers now fetch something other than `elsewhere`. A completed fetch changes nothing."""
        completed = {
            owner
            for owner, info in self._membership.view.downloads()
            if info.model == need.model and info.state is DownloadState.COMPLETED
        }
        return any(owner not in completed for owner, _ in elsewhere ^ self.fetched_elsewhere(need))

    async def shares(self, need: FetchNeed, missing: Pieces, elsewhere: OtherFetches) -> list[Share]:
        """Plans the sources of the missing bytes, as things are now. Raises FetchError if some bytes have no source."""
        own = await asyncio.to_thread(self._files.holding, need.model)
        company = {peer_id for peer_id, _ in elsewhere}
        if not own.digest:  # a model without a card is named in no peer's record, so all peers are asked
            company |= {peer.id for peer in self._membership.peers}
        others = [(peer, one) for peer, one in await self.holdings(need.model, company) if one.digest == own.digest]
        own_id = self._membership.own.id
        present = {own_id: own.present, **{peer.id: own.same_files(one) for peer, one in others}}
        readable = {peer.id for peer, _ in others}
        wanted = [*need.wants.items(), *(one for one in elsewhere if one[0] in readable)]
        if own.repo and any(minus(spans, _held(present, file)) for file, spans in missing.items()):
            wanted += (await self._through_store(need.model, own.digest)).items()
        wants = {**await asyncio.to_thread(self._pieces_of_all, need.model, wanted), own_id: missing}
        ways = {peer.id: peer for peer in self._ways() if peer.info.files_port}
        planned = fetch_plan(own_id, wants, present, list(ways), self._hub_users(need) if own.repo else ())
        _refuse_sourceless(need, planned, self.rules)
        return [
            Share(
                {file: tuple(spans) for file, spans in share.pieces.items()},
                tuple(
                    Source() if one.peer == HUB else self.source(ways[one.peer], is_arriving=one.is_arriving)
                    for one in share.sources
                ),
            )
            for share in planned
        ]

    async def _through_store(self, model: str, digest: str) -> Wants:
        """Lets the store's host fetch the whole model from the hub, if there is a host and it may, so that other peers
        copy the bytes as they arrive there. Returns what the host then wants. Raises FetchError."""
        host = self.store.remote
        if host is None or host.info.fetches != "hub" or not self.rules.store.may_ask_hub:
            return {}
        try:
            await pull(self._membership.calls, host.id, model, digest, {host.id: None})
        except MeshError as exc:
            raise FetchError(f"the store at {host.info.name} cannot fetch {model}: {exc}") from exc
        await asyncio.to_thread(self._files.touch, model, store=host.id)
        return {host.id: None}

    def _ways(self) -> list[Peer]:
        """Returns the other peers: the store's host first, then by the best measured path."""
        host = self.store.remote
        return sorted(self._membership.peers, key=lambda peer: (peer is not host, *_way_rank(peer)))

    def _pieces_of_all(self, model: str, wanted: Iterable[tuple[str, Layers]]) -> dict[str, Pieces]:
        """Returns the byte ranges of the wanted layers by peer id."""
        found: dict[str, dict[str, Spans]] = {}
        for peer_id, layers in wanted:
            pieces = found.setdefault(peer_id, {})
            for file, spans in self._files.pieces(model, layers).items():
                pieces[file] = merged((*pieces.get(file, ()), *spans))
        return dict(found)

    def _hub_users(self, need: FetchNeed) -> list[str]:
        """Returns the peers that may use the hub for a model. With a model store that is its host alone, while it is
        reachable."""
        own_id, store = self._membership.own.id, self.store
        users = [peer.id for peer in self._membership.peers if peer.info.fetches == "hub"]
        users += [own_id] if self.rules.fetches == "hub" and need.from_hub else []
        users = [one for one in users if need.hub_user in ("", one)]
        if not store.may_ask_hub:
            return []
        return [one for one in users if store.host is None or one == store.host.id]


def _way_rank(peer: Peer) -> tuple[float, float, str]:
    """Sort key of a peer: the best measured path first."""
    used = peer.paths.get(peer.client.address)
    speed = used.mb_per_s if used is not None and used.mb_per_s else 0.0
    return -speed, peer.rtt_ms if peer.rtt_ms is not None else float("inf"), peer.id


def _held(present: Mapping[str, Pieces], file: str) -> Spans:
    """Returns the bytes of a file that at least one peer has."""
    return merged([span for pieces in present.values() for span in pieces.get(file, ())])


def _refuse_sourceless(need: FetchNeed, planned: Sequence[PlannedShare], rules: FetchRules) -> None:
    model = need.model
    lost_bytes = sum(size_of_pieces(share.pieces) for share in planned if not share.sources)
    if lost_bytes:
        why, remedy = "and the model is not from the hub", "start a peer that has them"
        if rules.fetches == "peers":
            why = "and this node does not use the hub (--offline)"
            remedy = f"{remedy}, or start this node without --offline"
        elif not need.from_hub:
            why = "and in an open mesh this node does not use the hub for a peer"
            remedy = f"type `exo-mesh pull {model}` on this machine, or start its node with --open-admin"
        elif not rules.store.may_ask_hub:
            why = "and models that the store does not have are not fetched (--no-store-fallback)"
            remedy = f"{remedy}, or fetch the model into the store: POST /store/models/{model}/download"
        raise FetchError(f"{gigabytes(lost_bytes)} of {model} are on no live peer, {why}", remedy=remedy)

"""Where the bytes of a model come from: which peers have them, who else fetches them, and the plan from both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from exo_mesh.domain.download import DownloadState
from exo_mesh.domain.fetch_plan import HUB, PlannedShare, fetch_plan
from exo_mesh.domain.footprint import gigabytes
from exo_mesh.domain.spans import Pieces, Spans, merged, minus
from exo_mesh.errors import FetchError, MeshError
from exo_mesh.fetcher.wire import Share, Source
from exo_mesh.membership.peers import Peer
from exo_mesh.membership.service import Membership
from exo_mesh.models.downloads.rules import FetchRules
from exo_mesh.models.file_codec import holding_from_proto
from exo_mesh.models.local_files import Holding, Layers, LocalFiles, Wants, size_of_pieces
from exo_mesh.models.mesh_store import MeshStore
from exo_mesh.proto import control_pb2 as pb

_log = logging.getLogger(__name__)

OtherFetches = frozenset[tuple[str, Layers]]
"""(peer id, layers) of what other peers fetch of one model."""


@dataclass(frozen=True, slots=True)
class FetchNeed:
    """What this node is to have of a model. wants: of all peers that fetch the model for the same reason."""

    model: str
    layers: Layers
    wants: Wants


class ModelSources:
    """Asks peers what they have, and plans who fetches what from whom."""

    def __init__(self, membership: Membership, files: LocalFiles, rules: FetchRules, store: MeshStore) -> None:
        self._membership = membership
        self._files = files
        self.rules = rules
        self.store = store

    def source(self, peer: Peer, *, is_arriving: bool = False) -> Source:
        urls = tuple(f"{self.rules.scheme}://{host}:{peer.info.files_port}" for host in peer.hosts)
        return Source(peer.id, urls, is_arriving)

    async def holdings(self, model: str, company: Collection[str] = ()) -> list[tuple[Peer, Holding]]:
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

    def fetched_elsewhere(self, need: FetchNeed) -> OtherFetches:
        """What other peers fetch of the model now, besides what they fetch for the same reason."""
        return frozenset(
            (owner, None if info.is_whole else info.layers)
            for owner, info in self._membership.view.downloads()
            if info.model == need.model and info.state.is_active and owner != self._membership.own.id
        ) - frozenset(need.wants.items())

    def is_outdated(self, need: FetchNeed, elsewhere: OtherFetches) -> bool:
        """Checks whether others fetch something else than `elsewhere` now. One that is done changes nothing."""
        completed = {
            owner
            for owner, info in self._membership.view.downloads()
            if info.model == need.model and info.state is DownloadState.COMPLETED
        }
        return any(owner not in completed for owner, _ in elsewhere ^ self.fetched_elsewhere(need))

    async def shares(self, need: FetchNeed, missing: Pieces, elsewhere: OtherFetches) -> list[Share]:
        """Which of the missing bytes come from where, as things are now. Raises FetchError if some have no source."""
        own = await asyncio.to_thread(self._files.holding, need.model)
        company = {peer_id for peer_id, _ in elsewhere}
        if not own.digest:  # no record of a peer names a model that has no card
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
        planned = fetch_plan(own_id, wants, present, list(ways), self._hub_users() if own.repo else ())
        _refuse_sourceless(need.model, planned, self.rules)
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

    def _hub_users(self) -> list[str]:
        """The peers that may ask the hub for a model: with a model store its host only, unless that is away."""
        own_id, store = self._membership.own.id, self.store
        users = [peer.id for peer in self._membership.peers if peer.info.fetches == "hub"]
        users += [own_id] if self.rules.fetches == "hub" else []
        if not store.may_ask_hub:
            return []
        return [one for one in users if store.host is None or one == store.host.id]


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

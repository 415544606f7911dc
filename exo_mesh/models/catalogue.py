"""Every model that some live peer has on disk, and its card."""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from exo_mesh.domain.model import ModelCard
from exo_mesh.errors import MeshError, ModelError, UnknownModelError, error_from_code
from exo_mesh.membership.service import Membership
from exo_mesh.proto import control_pb2 as pb
from exo_mesh.weights.store import ModelStore

MAX_REMOTE_CARDS = 1024

_log = logging.getLogger(__name__)


def card_to_json(card: ModelCard) -> bytes:
    return json.dumps(asdict(card), separators=(",", ":")).encode()


def card_from_json(text: bytes) -> ModelCard:
    """Raises ModelError if it is no card: every field is checked, because placement computes with them."""
    try:
        card = msgspec.json.decode(text, type=ModelCard)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelError(f"a peer described a model in a way this version cannot read: {exc}") from exc
    sizes = (card.num_layers, card.hidden_size, card.vocab_size, card.context_length, *card.layer_bytes)
    kv_bytes = (card.kv_bytes_per_token, *card.kv_layer_bytes, *card.kv_fixed_bytes)
    if min(sizes) < 1 or min(card.embed_bytes, card.head_bytes, *kv_bytes) < 0:
        raise ModelError(f"a peer described {card.name[:80]!r} with sizes that no model has")
    return card


def is_path(name: str) -> bool:
    """Does this name mean a directory of this machine, and not a model by its name?"""
    return name.startswith(("/", "./", "../", "~"))


class Catalogue:
    """Models here and at the peers. Names are resolved here first.

    A directory is a model only once somebody on this machine has asked for it by its path: a plan of another peer
    cannot make this one open any path.
    """

    def __init__(self, store: ModelStore, membership: Membership) -> None:
        self._store = store
        self._membership = membership
        self._paths: set[str] = set()
        self._local: dict[str, ModelCard] = {}
        self._remote: dict[str, ModelCard] = {}

    @property
    def local_names(self) -> tuple[str, ...]:
        return tuple(self._local)

    @property
    def local_architectures(self) -> dict[str, str]:
        """The architecture of each model on this machine, by name."""
        return {name: card.architecture for name, card in self._local.items()}

    def names(self) -> dict[str, list[str]]:
        """Peer ids that have each model, for every model whose card is known here, by name."""
        found: dict[str, list[str]] = {name: [self._membership.own.id] for name in self._local}
        for peer in self._membership.peers:
            for name in peer.info.models:
                if name in self._local or name in self._remote:
                    found.setdefault(name, []).append(peer.id)
        return dict(sorted(found.items()))

    def known_card(self, name: str) -> ModelCard:
        """The card of one of `names()`."""
        return self._local[name] if name in self._local else self._remote[name]

    async def card(self, name: str) -> ModelCard:
        """The card of any model of the mesh. Raises UnknownModelError with near names, ModelError, TransportError."""
        if is_path(name):
            card = await asyncio.to_thread(self._store.card, name, allow_paths=True)
            self._paths.add(name)
            return card
        try:
            return await asyncio.to_thread(self._store.card, name)
        except UnknownModelError:
            if name in self._remote:
                return self._remote[name]
            await self._ask_peers(name)
            return self._remote[name]

    def local_card(self, name: str) -> ModelCard:
        """Blocking. The card of a model on this machine. Raises UnknownModelError or ModelError."""
        return self._store.card(name, allow_paths=name in self._paths)

    def local_dir(self, name: str) -> Path:
        """Blocking. Where a model of this machine lies. Raises UnknownModelError."""
        return self._store.find(name, allow_paths=name in self._paths)

    def local_text_files(self, name: str) -> list[Path]:
        """Blocking. Its tokenizer, templates and configs. Raises UnknownModelError."""
        return self._store.text_files(name, allow_paths=name in self._paths)

    def holders(self, name: str) -> list[str]:
        """Other live peers that have the model on disk."""
        return [peer.id for peer in self._membership.peers if name in peer.info.models]

    async def describe(self, name: str) -> pb.DescribeModelReply:
        """Answer a peer that asks for a card."""
        try:
            card = await asyncio.to_thread(self._store.card, name)
        except MeshError as exc:
            return pb.DescribeModelReply(found=False, error_code=exc.code, error_message=str(exc))
        return pb.DescribeModelReply(found=True, card_json=card_to_json(card))

    async def rescan(self) -> bool:
        """Look at the disk again; True if the models there are others than before."""
        cards = await asyncio.to_thread(self._scan)
        changed = cards.keys() != self._local.keys()
        self._local = cards
        return changed

    async def learn(self) -> None:
        """Ask peers for the cards of models that were not seen before, so that `names` can list them."""
        announced = {name for peer in self._membership.peers for name in peer.info.models}
        for name in list(self._remote.keys() - announced):
            del self._remote[name]
        for name in sorted(announced - self._remote.keys() - self._local.keys())[:MAX_REMOTE_CARDS]:
            try:
                await self._ask_peers(name)
            except MeshError as exc:
                _log.debug("no card of %s: %s", name, exc)

    def _scan(self) -> dict[str, ModelCard]:
        cards: dict[str, ModelCard] = {}
        for name in self._store.names():
            try:
                cards[name] = self._store.card(name)
            except MeshError as exc:
                _log.debug("%s is on disk but cannot be used: %s", name, exc)
        return cards

    async def _ask_peers(self, name: str) -> None:
        """Put the card of a model into `_remote`, from the first peer that has it."""
        failure: MeshError | None = None
        for peer_id in self.holders(name):
            peer = self._membership.peer(peer_id)
            if peer is None:
                continue
            try:
                reply = await peer.client.describe_model(name)
                if reply.found:
                    self._remote[name] = replace(card_from_json(reply.card_json), name=name)
                    return
                failure = error_from_code(reply.error_code, reply.error_message)
            except MeshError as exc:
                failure = exc
        raise failure or self._unknown(name)

    def _unknown(self, name: str) -> UnknownModelError:
        everything: Iterable[str] = {*self._local, *self._remote}
        near = difflib.get_close_matches(name[:200], everything, n=3, cutoff=0.4)
        hint = f"; near: {', '.join(near)}" if near else ""
        return UnknownModelError(f"no peer has a model {name[:200]!r}{hint}", param="model")

"""Lists every model that a live peer has on disk, and its card."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import msgspec
from msgspec.structs import replace

from exo_mesh.base.tasks import SharedCalls
from exo_mesh.domain.model import ModelCard
from exo_mesh.errors import MeshError, ModelError, UnknownModelError
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.calls import describe_model
from exo_mesh.models.cards.card_store import CardStore
from exo_mesh.models.names import KnownNames, ModelReference, find_reference, unknown_model
from exo_mesh.models.served import ServedModels, served_card
from exo_mesh.weights.card import quant_method_at
from exo_mesh.weights.fetched import read_manifest
from exo_mesh.weights.model_files import one_line
from exo_mesh.weights.store import ModelStore

MAX_REMOTE_CARDS = 1024

LOOK_S = 2.0
"""How long a node waits for a scan of its models; models that take longer are served later."""

START_LOOK_S = 10.0
"""How long a starting node waits for its first scan: a node that is ready should list its models."""

MAX_LOGGED = 16
"""Most unusable models per scan that get a log line each; a log shows 20 lines of a kind a minute."""

CLOSE_S = 3.0
"""How long a stopping node waits for the model that is being read."""

_log = logging.getLogger(__name__)


class _Look(msgspec.Struct, frozen=True):
    """One scan of the models on this machine, filled in by a thread. partial: models without all of their weights.
    unusable: (reason, place) by name."""

    cards: dict[str, ModelCard] = msgspec.field(default_factory=dict)
    partial: set[str] = msgspec.field(default_factory=set)
    unusable: dict[str, tuple[str, str]] = msgspec.field(default_factory=dict)


class Catalogue:
    """Models here and on peers. A name means the model here first, unless its files cannot be used; a served model only
    if there are no files of that name."""

    def __init__(
        self,
        store: ModelStore,
        membership: Membership,
        shelf: CardStore | None = None,
        served: ServedModels | None = None,
    ) -> None:
        """shelf: the cards whose ids and aliases are names of models. served: what model servers have. By default there
        are none."""
        self._served = served
        self._store = store
        self._lookups: SharedCalls[ModelCard] = SharedCalls()
        self._membership = membership
        self._shelf = shelf
        self._local: dict[str, ModelCard] = {}
        self._partial: frozenset[str] = frozenset()
        self._is_stale = False
        self._unusable: dict[str, str] = {}
        self._look: tuple[_Look, asyncio.Task[None]] | None = None
        self._closed = threading.Event()
        self._remote: dict[str, ModelCard] = {}

    @property
    def local_names(self) -> tuple[str, ...]:
        """Models that are complete on this machine."""
        return tuple(name for name in self._local if name not in self._partial)

    @property
    def partial_names(self) -> tuple[str, ...]:
        """Models with config, tokenizer and headers on this machine, but not all weights."""
        return tuple(name for name in self._local if name in self._partial)

    @property
    def unusable(self) -> dict[str, str]:
        """The reason why a model on this machine cannot be used, by name; without paths."""
        return dict(self._unusable)

    @property
    def local_architectures(self) -> dict[str, str]:
        """The architecture of each model on this machine, by name."""
        return {name: card.architecture for name, card in self._local.items()}

    def local_quant_methods(self) -> dict[str, str]:
        """See quant_method_at: of each model on this machine, by name. Blocking."""
        models = self._store.found().models
        return {name: quant_method_at(models[name]) for name in self._local if name in models}

    def is_partial(self, name: str) -> bool:
        """Whether no peer has all files of a model, although some have its headers, or parts of it."""
        whole = name in self.local_names or any(name in peer.info.models for peer in self._membership.peers)
        return not whole and (name in self._partial or bool(self.holders(name)))

    def names(self) -> dict[str, list[str]]:
        """Returns the ids of the peers that have each model or parts of it, or serve it, by name, for models with known
        cards."""
        found: dict[str, list[str]] = {name: [self._membership.own.id] for name in self._local}
        for peer in self._membership.peers:
            for name in (*peer.info.models, *peer.info.partial_models):
                if name in self._local or name in self._remote:
                    found.setdefault(name, []).append(peer.id)
        served = {} if self._served is None else self._served.names()
        return dict(sorted({**served, **found}.items()))

    def known_card(self, name: str) -> ModelCard:
        """Returns the card of one of `names()`."""
        if name in self._local:
            return self._local[name]
        return self._remote[name] if name in self._remote else self._served_card(name)

    async def card(self, name: str) -> ModelCard:
        """Returns the card of any model in the mesh, by its name there or by another name for it (see names.py).

        Raises UnknownModelError with similar names, ModelError if the files here cannot be used and no peer has others,
        and TransportError.
        """
        if (found := await self._find(name)) is not None:
            return found
        if self._served is not None:
            self._served.raise_if_down(name)
        meant = (await self.reference(name)).in_mesh
        if meant != name and (found := await self._find(meant)) is not None:
            return found
        known = self._known_names()
        if meant.lower() in known.cards:
            raise UnknownModelError(f"no peer has the files of {meant}", param="model")
        raise unknown_model(meant, known)

    async def reference(self, text: str) -> ModelReference:
        """Resolves a name to a model, which need not be in the mesh. Raises UnknownModelError."""
        # searching for similar names among thousands takes milliseconds
        return await asyncio.to_thread(find_reference, text, self._known_names())

    async def _find(self, name: str) -> ModelCard | None:
        """Returns the card of a model by its name in the mesh; None if no peer has the model."""
        unusable: ModelError | None = None
        try:
            return await self._lookups.get(name, lambda: asyncio.to_thread(self._store.card, name))
        except UnknownModelError:
            pass
        except ModelError as exc:
            unusable = exc
        if not self.holders(name):
            self._remote.pop(name, None)
        if name not in self._remote:
            if not self.holders(name):
                if unusable is not None:
                    raise unusable
                found = None if self._served is None else self._served.find(name)
                return None if found is None else served_card(found)
            await self._ask_peers(name)
        return self._remote[name]

    async def name_at(self, path: Path) -> str:
        """Returns the name of the model in a directory of this machine. Raises UnknownModelError."""
        return await asyncio.to_thread(self._store.name_at, path)

    def _served_card(self, name: str) -> ModelCard:
        found = None if self._served is None else self._served.find(name)
        if found is None:
            raise UnknownModelError(f"no peer serves {name} any more", param="model")
        return served_card(found)

    def local_card(self, name: str) -> ModelCard:
        """Blocking. Returns the card of a model on this machine. Raises UnknownModelError or ModelError."""
        served = None if self._served is None else self._served.here(name)
        if served is not None and name not in self._local:
            return served_card(served)
        return self._store.card(name)

    def local_dir(self, name: str) -> Path:
        """Blocking. Returns a model's directory here. Raises UnknownModelError, or ModelError if it is unusable."""
        self._store.card(name)
        return self._store.find(name)

    def holders(self, name: str) -> list[str]:
        """Returns the other live peers that have the model on disk, or at least config, tokenizer and headers."""
        return [peer.id for peer in self._membership.peers if peer.info.knows(name)]

    def file_card(self, name: str) -> ModelCard:
        """Blocking. Like local_card, for a model whose files are here."""
        return self._store.card(name)

    async def rescan(self, *, is_first: bool = False) -> bool:
        """Scans the disk again, for at most LOOK_S, or START_LOOK_S; True if the models there have changed.

        A longer scan goes on, and the next call waits for it.
        """
        if self._look is None:
            self._is_stale = False
            look = _Look()
            self._look = (look, asyncio.create_task(asyncio.to_thread(self._scan, look), name="look at models"))
        look, task = self._look
        await asyncio.wait({task}, timeout=START_LOOK_S if is_first else LOOK_S)
        before = self.local_names, self.partial_names
        if task.done():
            self._look = None
            task.result()
            self._local, self._partial = look.cards, frozenset(look.partial)
        else:  # until the scan ends, models that were known stay known
            self._local = {**self._local, **dict(look.cards)}
            self._partial = self._partial | frozenset(list(look.partial))
        self._note_unusable(dict(look.unusable), is_all=task.done())
        return (self.local_names, self.partial_names) != before

    @property
    def is_reading(self) -> bool:
        """Whether a scan is still going on, so that the lists may lack models of this machine."""
        return self._look is not None and not self._look[1].done()

    @property
    def is_due(self) -> bool:
        """Whether `rescan` would find news at once: a model was fetched or deleted, or a long scan has ended."""
        return self._is_stale or (self._look is not None and self._look[1].done())

    def look_soon(self) -> None:
        """Marks the models here as changed, so that the next `rescan` is due."""
        self._is_stale = True

    async def close(self) -> None:
        """Ends a running scan, after the model that is being read."""
        self._closed.set()
        if self._look is not None:
            await asyncio.wait({self._look[1]}, timeout=CLOSE_S)
            self._look[1].cancel()

    def _note_unusable(self, found: dict[str, tuple[str, str]], *, is_all: bool) -> None:
        news = [name for name, (reason, _) in found.items() if self._unusable.get(name) != reason]
        for name in news[:MAX_LOGGED]:
            reason, where = found[name]
            _log.warning("model %s in %s cannot be used: %s", name, where, reason)
        if more := news[MAX_LOGGED:]:
            _log.warning("%d more models cannot be used; `exo-mesh models` lists them with the reasons", len(more))
        reasons = {name: reason for name, (reason, _) in found.items()}
        self._unusable = reasons if is_all else {**self._unusable, **reasons}

    def _announced(self) -> set[str]:
        """Models that other peers have, or parts of them."""
        return {name for peer in self._membership.peers for name in (*peer.info.models, *peer.info.partial_models)}

    async def learn(self) -> None:
        """Asks peers for the cards of new models, so that `names` can list them."""
        if self._served is not None:
            self._served.remember()
        announced = self._announced()
        for name in list(self._remote.keys() - announced):
            del self._remote[name]
        for name in sorted(announced - self._remote.keys() - self._local.keys())[:MAX_REMOTE_CARDS]:
            try:
                await self._ask_peers(name)
            except MeshError as exc:
                _log.debug("no card of %s: %s", name, exc)

    def _scan(self, look: _Look) -> None:
        """Blocking. Reads the cards of all models on this machine, the shipped model first."""
        found = self._store.found()
        for name, reason in found.misnamed.items():
            look.unusable[name] = (reason, "a directory of that name")
        for name, model_dir in found.models.items():
            if self._closed.is_set():
                return
            try:
                manifest = read_manifest(model_dir)
                if manifest is not None and not manifest.is_whole:
                    look.partial.add(name)
                look.cards[name] = self._store.card_at(name, model_dir, found.sources.get(model_dir))
            except ModelError as exc:
                look.unusable[name] = (str(exc), one_line(str(model_dir)))
        self._store.forget(found)

    async def _ask_peers(self, name: str) -> None:
        """Stores the card of a model in `_remote`, from the first peer that has it."""
        failure: MeshError | None = None
        for peer_id in self.holders(name):
            peer = self._membership.peer(peer_id)
            if peer is None:
                continue
            try:
                card = await describe_model(self._membership.calls, peer.id, name)
                self._remote[name] = replace(card, name=name)
                return
            except MeshError as exc:
                failure = exc
        raise failure or unknown_model(name, self._known_names())

    def _known_names(self) -> KnownNames:
        """Returns copies, so that a thread may use them."""
        announced = self._announced()
        cards = {} if self._shelf is None else self._shelf.ids()
        return KnownNames(tuple(self._local), announced, cards)

"""The models that model servers beside the nodes of the mesh serve: looks at this node's servers, and lists all."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from msgspec.structs import replace

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.printable import printable
from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.whole.served import MAX_SERVED, SERVED_ARCHITECTURE, SERVED_DIGEST, ServedModel, ServerReport
from exo_mesh.engine.registry import Registry
from exo_mesh.engine.whole import ModelServer
from exo_mesh.errors import MeshError, PendingPlacementError
from exo_mesh.mesh.membership.service import Membership

LOOK_EVERY_S = 3.0
LOOK_S = 4.0
"""Deadline of one look at all servers of an engine; an engine gives each server 2 s."""

UNKNOWN_CONTEXT = 131_072
"""Tokens of context of a model whose server does not say how many it has. The server refuses longer requests."""

DOWN_S = 3600.0
"""How long a model of a server that is down is remembered, to say so to clients that ask for it."""

_log = logging.getLogger(__name__)

OnReports = Callable[[str, Sequence[ServerReport]], object]


def served_card(model: ServedModel) -> ModelCard:
    """The card by which a served model is placed: one layer, and no memory of ours."""
    said = "\0".join((model.engine, model.name, model.stands_for))
    return ModelCard(
        name=model.name,
        architecture=SERVED_ARCHITECTURE,
        num_layers=1,
        hidden_size=1,
        vocab_size=1,
        context_length=model.context_limit or UNKNOWN_CONTEXT,
        layer_bytes=(1,),
        embed_bytes=0,
        head_bytes=0,
        tied=False,
        kv_bytes_per_token=0,
        dtype="",
        eos_ids=(),
        legal_cuts=(),
        digest=SERVED_DIGEST + hashlib.sha256(said.encode()).hexdigest(),
    )


class ServedModels:
    """The served models of this node and of its peers. `look` asks the servers here and publishes what they have."""

    def __init__(
        self,
        registry: Registry,
        membership: Membership,
        options: Mapping[str, Mapping[str, str]],
        on_reports: OnReports = lambda engine, reports: None,
        clock: Clock = monotonic,
    ) -> None:
        """options: by engine; see ModelServer.look. on_reports: gets the reports of each look, by engine."""
        self._servers = {
            name: provider
            for name, provider in registry.providers.items()
            if provider.kind == "whole-model" and isinstance(provider, ModelServer)
        }
        self._membership = membership
        self._options = options
        self._on_reports = on_reports
        self._clock = clock
        self._own: dict[str, ServedModel] = {}
        self._down: dict[str, tuple[str, float]] = {}
        self._elsewhere: dict[str, str] = {}
        """What to say of each model of another peer if it is not served any more."""
        self._failures: dict[str, str] = {}

    @property
    def own(self) -> tuple[ServedModel, ...]:
        """What the servers beside this node serve now."""
        return tuple(self._own.values())

    def options(self, engine: str) -> dict[str, str]:
        """The settings of this node for a whole-model engine."""
        return dict(self._options.get(engine, {}))

    def here(self, name: str) -> ServedModel | None:
        """A model that a server beside this node serves now; None if none does."""
        return self._own.get(name)

    def find(self, name: str) -> ServedModel | None:
        """A model that is served by this node or a live peer; None if no one serves it."""
        found = self._own.get(name)
        return found or next((one for info in self._others() for one in info.served if one.name == name), None)

    def names(self) -> dict[str, list[str]]:
        """The ids of the peers that serve each model, by name."""
        found: dict[str, list[str]] = {name: [self._membership.own.id] for name in self._own}
        for info in self._others():
            for one in info.served:
                found.setdefault(one.name, []).append(info.id)
        return found

    def standing_for(self, model: str) -> list[str]:
        """The names of served models that can answer for this model, because they are the same model."""
        every = [*self._own.values(), *(one for info in self._others() for one in info.served)]
        return list(dict.fromkeys(one.name for one in every if one.stands_for == model))

    def raise_if_down(self, name: str) -> None:
        """Raises PendingPlacementError for a model whose server was up within the last hour and is down."""
        self.remember()
        why, until = self._down.get(name, ("", 0.0))
        if why and self._clock() < until:
            raise PendingPlacementError(
                f"the server of {name} is down: {why}", reason="server_down", remedy="start the server again"
            )

    def remember(self) -> None:
        """Notes which models of other peers are served now, and which are not any more."""
        now = {
            one.name: f"{info.name} does not offer {one.server} any more"
            for info in self._others()
            for one in info.served
        }
        until = self._clock() + DOWN_S
        for name, why in self._elsewhere.items():
            if name not in now and name not in self._own:
                self._down.setdefault(name, (why, until))
        self._elsewhere = now
        self._forget({*now, *self._own})

    async def keep(self) -> None:
        """Looks at the servers here every LOOK_EVERY_S; returns at once if this node has no engine for any."""
        while self._servers:
            await self.look()
            await next_wakeup(LOOK_EVERY_S)

    async def look(self) -> None:
        """Asks every server here once, and publishes what has changed."""
        found: dict[str, ServedModel] = {}
        for engine, provider in sorted(self._servers.items()):
            reports = await self._reports(engine, provider.look(self.options(engine)))
            self._on_reports(engine, reports)
            for report in reports:
                self._note(engine, report)
                for one in report.models:
                    found.setdefault(one.name, _printable(one, engine))
        self._note_lost(found)
        self._own = dict(list(found.items())[:MAX_SERVED])
        if (served := self.own) != self._membership.own.served:
            self._membership.describe(replace(self._membership.own, served=served))

    async def _reports(self, engine: str, look: Awaitable[Sequence[ServerReport]]) -> Sequence[ServerReport]:
        try:
            async with asyncio.timeout(LOOK_S):
                return await look
        except MeshError as exc:
            return [ServerReport("", False, error=str(exc))]
        except TimeoutError:
            return [ServerReport("", False, error=f"engine {engine} has not answered within {LOOK_S:g} s")]

    def _note(self, engine: str, report: ServerReport) -> None:
        """Log a server that came up or went down."""
        key = f"{engine} {report.server}".strip()
        before, self._failures[key] = self._failures.get(key), report.error
        if before == report.error:
            return
        if report.is_up:
            names = ", ".join(one.name for one in report.models) or "none"
            _log.info("model server %s (%s) is up; models: %s", report.server, engine, names)
        else:
            _log.warning("model server %s (%s) is not up: %s", report.server, engine, report.error)

    def _note_lost(self, found: Mapping[str, ServedModel]) -> None:
        until = self._clock() + DOWN_S
        for name, one in self._own.items():
            if name not in found:
                why = self._failures.get(f"{one.engine} {one.server}", "") or f"{one.server} no longer has it"
                self._down[name] = why, until
        self._forget({*found, *self._elsewhere})

    def _forget(self, served: Collection[str]) -> None:
        """Drop models that are served again, and models that were lost long ago."""
        newest = list(self._down.items())[-MAX_SERVED:]
        self._down = {name: entry for name, entry in newest if name not in served and self._clock() < entry[1]}

    def _others(self) -> list[PeerInfo]:
        return [peer.info for peer in self._membership.peers]


def _printable(model: ServedModel, engine: str) -> ServedModel:
    """The model as it is announced: a server's names come from outside."""
    return replace(model, name=printable(model.name, 256), engine=engine, stands_for=printable(model.stands_for, 256))

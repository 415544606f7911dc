"""Implements the model store's calls at this node, whichever peer hosts the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exo_mesh.domain.download import DownloadEntry
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.mesh_store import MeshStore
from exo_mesh.node.model_desk import ModelDesk


class StoreDesk:
    """Implements StoreService."""

    def __init__(self, membership: Membership, catalogue: Catalogue, store: MeshStore, desk: ModelDesk) -> None:
        self._membership = membership
        self._catalogue = catalogue
        self._store = store
        self._desk = desk

    def health(self) -> dict[str, Any]:
        host, rules = self._store.host, self._store.rules
        room = None if host is None else self._membership.telemetry.get(host.id)
        return {
            "status": "unreachable" if host is None else "ok",
            "host": {"id": "" if host is None else host.id, "name": rules.host if host is None else host.name},
            "is_here": rules.is_here,
            "models": 0 if host is None else len(host.models),
            "room_bytes": None if room is None else room.fetch_room_bytes,
            "hub_fallback": rules.may_ask_hub,
            "keep_recent_bytes": rules.keep_bytes,
        }

    def registry(self) -> list[dict[str, Any]]:
        host = self._store.require_host()
        known = self._catalogue.names()
        return [
            {
                "id": name,
                "object": "store.model",
                "whole": name in host.models,
                "bytes": self._catalogue.known_card(name).total_bytes if name in known else None,
                "staged_at": [peer_id for peer_id in known.get(name, ()) if peer_id != host.id],
            }
            for name in sorted({*host.models, *host.partial_models})
        ]

    def downloads(self, model: str = "") -> list[DownloadEntry]:
        host = self._store.require_host()
        return [one for one in self._desk.entries() if one.peer_id == host.id and model in ("", one.model)]

    async def start(self, model: str) -> list[DownloadEntry]:
        return await self._desk.start(model, peers=(self._store.require_host().id,), whole=True, is_asked_for=True)

    async def delete(self, model: str) -> bool:
        return bool(await self._desk.delete(model, peers=(self._store.require_host().id,)))

    async def purge(self, peers: Sequence[str]) -> list[str]:
        return await self._desk.purge_staged(peers)

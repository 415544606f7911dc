"""Implements the model store's calls at this node, whichever peer hosts the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from exo_mesh.domain.download import DownloadEntry
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.mesh_store import MeshStore
from exo_mesh.node.model_service import ModelService


class StoreService:
    """The model store of the mesh. All calls except `health` raise NotReadyError while its host is not in the mesh."""

    def __init__(self, membership: Membership, catalogue: Catalogue, store: MeshStore, models: ModelService) -> None:
        self._membership = membership
        self._catalogue = catalogue
        self._store = store
        self._models = models

    @property
    def is_configured(self) -> bool:
        """Whether the settings name a store, or a live peer has one."""
        return self._store.is_configured

    def health(self) -> dict[str, Any]:
        """{"status": "ok" | "unreachable", "host": {"id", "name"}, "is_here", "models", "room_bytes", "hub_fallback",
        "keep_recent_bytes"}; keep_recent_bytes: None if this node does not delete idle staged copies."""
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
        """The models of the host: [{"id", "object", "whole", "bytes", "staged_at": ids of peers}]."""
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
        """The current and recently ended downloads of the host; of one model, if it is named."""
        host = self._store.require_host()
        return [one for one in self._models.downloads() if one.peer_id == host.id and model in ("", one.model)]

    async def start(self, model: str) -> list[DownloadEntry]:
        """Lets the host download all files of a model. Raises as ModelService.start_download."""
        return await self._models.start_download(
            model, peers=(self._store.require_host().id,), whole=True, is_asked_for=True
        )

    async def delete(self, model: str) -> bool:
        """Deletes a model from the store; peers then delete their staged copies, too. False if the store does not have
        the model. Raises InputError if an instance uses it."""
        return bool(await self._models.delete(model, peers=(self._store.require_host().id,)))

    async def purge(self, peers: Sequence[str]) -> list[str]:
        """Deletes all unused staged copies, everywhere or on these peers; returns the ids of peers that had any."""
        return await self._models.purge_staged(peers)

"""The rules for this node's downloads: which bytes it may fetch, and from where."""

from __future__ import annotations

import msgspec

from exo_mesh.errors import FetchError
from exo_mesh.models.mesh_store import StoreRules


class FetchRules(msgspec.Struct, frozen=True):
    """The rules. fetches: one of domain.device.FETCHES. max_bytes: limit for all fetched models together, None: no
    limit. evict_pinned: models that were pulled by name may be deleted too. scheme: of the file servers' URLs."""

    fetches: str = "hub"
    max_bytes: int | None = None
    evict_pinned: bool = False
    scheme: str = "http"
    store: StoreRules = msgspec.field(default_factory=StoreRules)

    def require(self, *, from_hub: bool) -> None:
        """Raises FetchError unless this node fetches models. from_hub: it must also be allowed to use the hub."""
        if not self.fetches:
            raise FetchError(
                "this node does not fetch models (--no-fetch)", remedy="start it without --no-fetch", is_final=True
            )
        if from_hub and self.fetches != "hub":
            raise FetchError(
                "this node does not use the hub (--offline)",
                remedy="start it without --offline, or start a peer that has the model",
                is_final=True,
            )  # fmt: skip

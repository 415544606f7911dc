"""What this node may fetch, and from where."""

from __future__ import annotations

from dataclasses import dataclass, field

from exo_mesh.errors import FetchError
from exo_mesh.models.mesh_store import StoreRules


@dataclass(frozen=True, slots=True)
class FetchRules:
    """fetches: one of domain.device.FETCHES. max_bytes: that all fetched models may take together, None: any number.
    evict_pinned: also models that were pulled by name may be deleted to make room. scheme: of the file servers."""

    fetches: str = "hub"
    max_bytes: int | None = None
    evict_pinned: bool = False
    scheme: str = "http"
    store: StoreRules = field(default_factory=StoreRules)

    def require(self, *, from_hub: bool) -> None:
        """Raise FetchError unless this node fetches models. from_hub: from the hub, too."""
        if not self.fetches:
            raise FetchError("this node fetches no models (--no-fetch)", remedy="start it without", is_final=True)
        if from_hub and self.fetches != "hub":
            raise FetchError(
                "this node asks no hub (--offline)", remedy="start it without, or start a peer that has the model",
                is_final=True,
            )  # fmt: skip

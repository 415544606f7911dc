"""What somebody asks of an instance: the model, and how it may be placed."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.domain.grouping import GroupWish, WishedBackend
from exo_mesh.domain.pinning import Pin
from exo_mesh.settings.config import Settings


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """A wish for an instance. policy and min_peers None mean the node's own settings.

    exclude_peers, pins: peers by id or name. With pins it is decided who holds what: policy and min_peers have no say.
    engine: every stage runs with this one. engine_preference: engines or tags (`torch`, `mlx-metal`) that peers should
    rather use than what they would choose, the first one first. mixed_rings: may stages be of several engines, one of
    `domain.rings.MIXING`; None means the node's own setting. tensor_group: 1 no tensor group, N at least one of N
    peers. groups: which peers they are, by id or name, the leader first. group_backend: how their ranks meet. What is
    left open of these is as the node's own settings have it.
    """

    model: str
    min_peers: int | None = None
    policy: str | None = None
    context_limit: int | None = None
    engine: str | None = None
    exclude_peers: tuple[str, ...] = ()
    pins: tuple[Pin, ...] = ()
    engine_preference: tuple[str, ...] = ()
    mixed_rings: str | None = None
    tensor_group: int | None = None
    groups: tuple[tuple[str, ...], ...] = ()
    group_backend: WishedBackend | None = None

    def group_wish(self, settings: Settings) -> GroupWish:
        """With what the wish leaves open as the settings have it."""
        size = self.tensor_group if self.tensor_group or self.groups else settings.tensor_group or None
        return GroupWish(size, self.groups, self.group_backend or settings.group_backend)

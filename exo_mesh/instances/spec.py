"""What a client asks of an instance: the model, and how it may be placed."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.domain.grouping import GroupWish, WishedBackend
from exo_mesh.domain.pinning import Pin
from exo_mesh.settings.config import Settings


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """A requested instance. None for policy and min_peers means the node's own settings.

    exclude_peers, pins: peers by id or name. Pins fix the layers of each peer, so policy and min_peers are ignored.
    engine: the engine of every stage. engine_preference: engines or tags (`torch`, `mlx-metal`) that peers should
    prefer to their own choice, in this order. mixed_rings: whether stages may use several engines, one of
    `domain.rings.MIXING`; None means the node's own setting. tensor_group: 1 for no tensor group, N for at least one of
    N peers. groups: the peers of each group, by id or name, the leader first. group_backend: how their ranks
    communicate. is_auto: nobody asked for the instance; it is placed because the requests of its model have to wait.
    Open fields use the node's own settings.
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
    is_auto: bool = False

    def group_wish(self, settings: Settings) -> GroupWish:
        """The requested grouping, with open fields taken from the settings."""
        size = self.tensor_group if self.tensor_group or self.groups else settings.tensor_group or None
        return GroupWish(size, self.groups, self.group_backend or settings.group_backend)

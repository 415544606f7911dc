"""The optional model store: one peer keeps the canonical copies of models, and the others stage theirs from it."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.domain.device import PeerInfo
from exo_mesh.errors import MeshError
from exo_mesh.membership.peers import Peer
from exo_mesh.membership.service import Membership
from exo_mesh.settings.config import ConfigError, Settings

GIB = 2**30


@dataclass(frozen=True, slots=True)
class StoreRules:
    """is_here: this node is the store's host. host: name or id of the peer that is; "" is any that says so.
    may_ask_hub: models that the store does not have may be fetched from the hub. keep_bytes: that idle staged copies
    may take, None: any number."""

    is_enabled: bool = True
    is_here: bool = False
    host: str = ""
    may_ask_hub: bool = True
    keep_bytes: int | None = 40 * GIB

    @staticmethod
    def of(settings: Settings, own_id: str) -> StoreRules:
        """store_host may name a node of another name: then --store, which may be in a shared config.toml, means nothing
        here. Raises ConfigError if the directory of the store is not there: its disk may not be mounted, and an empty
        store would make all peers delete their copies."""
        is_named = settings.store_host in ("", settings.name, own_id)
        is_here = settings.store_enabled and settings.store is not None and is_named
        if is_here and settings.store is not None and not settings.store.is_dir():
            raise ConfigError(f"--store {settings.store}: there is no such directory; make it first", param="store")
        return StoreRules(
            is_enabled=settings.store_enabled,
            is_here=is_here,
            host=settings.store_host,
            may_ask_hub=settings.store_fallback,
            keep_bytes=settings.store_keep_gb * GIB if settings.store_cleanup else None,
        )


class MeshStore:
    """Which peer the store's host is now."""

    def __init__(self, membership: Membership, rules: StoreRules) -> None:
        self._membership = membership
        self.rules = rules

    @property
    def is_configured(self) -> bool:
        """Whether the settings name a store, or a live peer has one. The store's host may be away."""
        return self.rules.is_enabled and (bool(self.rules.host) or self.host is not None)

    @property
    def may_ask_hub(self) -> bool:
        """Whether a model may come from the hub without that somebody asked for it to be fetched into the store."""
        return self.rules.may_ask_hub or self.rules.is_here or not self.is_configured

    @property
    def host(self) -> PeerInfo | None:
        """This node or a live peer; of several stores, the one of the lowest peer id."""
        if self.rules.is_here:
            return self._membership.own
        peer = self.remote
        return None if peer is None else peer.info

    @property
    def remote(self) -> Peer | None:
        """The host, if that is another peer."""
        if self.rules.is_here or not self.rules.is_enabled:
            return None
        stores = [peer for peer in self._membership.peers if peer.info.has_store]
        named = [peer for peer in stores if self.rules.host in ("", peer.id, peer.info.name)]
        return min(named, key=lambda peer: peer.id, default=None)

    def staged_from(self, model: str) -> str:
        """The id of the host, if a copy of this model that is made here now is a staged one; else ""."""
        peer = self.remote
        return peer.id if peer is not None and peer.info.knows(model) else ""

    async def has_lost(self, host_id: str, model: str) -> bool:
        """Whether that host is here and its store no longer has the model. It is asked, since what a peer tells of its
        models may be cut short."""
        host = next((peer for peer in self._membership.peers if peer.id == host_id), None)
        if host is None or not host.info.has_store or host.info.knows(model):
            return False
        try:
            return not (await host.client.describe_files(model)).found
        except MeshError:
            return False

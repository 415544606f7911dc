"""The optional model store: one peer keeps the canonical copies of models, and the other peers stage theirs from it."""

from __future__ import annotations

import msgspec

from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.peer_names import matching, peer_named
from exo_mesh.errors import MeshError, NotReadyError
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.calls import describe_files
from exo_mesh.settings.config import ConfigError, Settings

GIB = 2**30


class StoreRules(msgspec.Struct, frozen=True):
    """The rules for the store. is_here: this node hosts the store. host: the peer that hosts it, by what
    peer_names.matching takes; "" accepts any peer with a store. may_ask_hub: models that the store does not have may be
    fetched from the hub. keep_bytes: limit for idle staged copies, None: no limit."""

    is_enabled: bool = True
    is_here: bool = False
    host: str = ""
    may_ask_hub: bool = True
    keep_bytes: int | None = 40 * GIB

    @staticmethod
    def of(settings: Settings, own: PeerInfo) -> StoreRules:
        """Reads the rules from the settings. If store_host names another node, --store has no effect here, because it
        may stand in a shared config.toml. Raises ConfigError if the directory of the store does not exist: its disk may
        not be mounted, and an empty store would make all peers delete their copies."""
        is_named = not settings.store_host or bool(matching(settings.store_host, [own]))
        is_here = settings.store_enabled and settings.store is not None and is_named
        if is_here and settings.store is not None and not settings.store.is_dir():
            raise ConfigError(
                f"--store {settings.store}: the directory does not exist; create it or mount its disk first",
                param="store",
            )
        return StoreRules(
            is_enabled=settings.store_enabled,
            is_here=is_here,
            host=settings.store_host,
            may_ask_hub=settings.store_fallback,
            keep_bytes=settings.store_keep_gb * GIB if settings.store_cleanup else None,
        )


class MeshStore:
    """Finds the peer that hosts the store at the moment."""

    def __init__(self, membership: Membership, rules: StoreRules) -> None:
        self._membership = membership
        self.rules = rules

    @property
    def is_configured(self) -> bool:
        """Whether the settings name a store, or a live peer has one. The host itself may be unreachable."""
        return self.rules.is_enabled and (bool(self.rules.host) or self.host is not None)

    @property
    def may_ask_hub(self) -> bool:
        """Whether a model may come from the hub without an explicit request to fetch it into the store."""
        return self.rules.may_ask_hub or self.rules.is_here or not self.is_configured

    @property
    def host(self) -> PeerInfo | None:
        """This node or a live peer; of several stores, the store of the lowest peer id. None if several stores have
        the name of the setting."""
        if self.rules.is_here:
            return self._membership.own
        peer = self.remote
        return None if peer is None else peer.info

    @property
    def remote(self) -> Peer | None:
        """The host, if it is another peer."""
        if self.rules.is_here or not self.rules.is_enabled:
            return None
        stores = [peer for peer in self._membership.peers if peer.info.has_store]
        if not self.rules.host:
            return min(stores, key=lambda peer: peer.id, default=None)
        named = matching(self.rules.host, [peer.info for peer in stores])
        return self._membership.peer(named[0].id) if len(named) == 1 else None

    def require_host(self) -> PeerInfo:
        """The host. Raises NotReadyError if it is not in the mesh, and InputError if several stores have its name."""
        if (host := self.host) is not None:
            return host
        stores = [peer.info for peer in self._membership.peers if peer.info.has_store]
        if self.rules.host and matching(self.rules.host, stores):
            return peer_named(self.rules.host, stores, "store_host")
        raise NotReadyError(
            f"the host of the model store, {self.rules.host}, is not in the mesh; start it and try again"
        )

    def staged_from(self, model: str) -> str:
        """Returns the id of the host, if a copy of this model made here now would be a staged one; else ""."""
        peer = self.remote
        return peer.id if peer is not None and peer.info.knows(model) else ""

    async def has_lost(self, host_id: str, model: str) -> bool:
        """Whether that host is reachable and its store no longer has the model. The host is asked, because the list of
        models in a peer's record may be truncated."""
        host = next((peer for peer in self._membership.peers if peer.id == host_id), None)
        if host is None or not host.info.has_store or host.info.knows(model):
            return False
        try:
            return await describe_files(self._membership.calls, host.id, model) is None
        except MeshError:
            return False

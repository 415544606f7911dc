"""What this machine has on its disk of parts of models: KV of earlier prompts, and weights. Published for placement."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

from msgspec.structs import replace

from exo_mesh import __version__
from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.domain.engine_speed import DIGEST_CHARS, MAX_MODELS
from exo_mesh.domain.shard import MAX_KEPT, KeptLayers
from exo_mesh.engine.registry import provider
from exo_mesh.errors import MeshError
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.local_files import LocalFiles
from exo_mesh.rings.prefix_disk.makers import KeptKv, KvMaker
from exo_mesh.settings.config import Settings
from exo_mesh.weights.fetched import MANIFEST_FILE

LOOK_EVERY_S = 10.0

FIRST_LOOK_S = 1.0
"""Longest wait of a node's start for the first look; a look that takes longer is published later."""

SETTLED_S = 5.0
"""Weights that arrived more recently are not looked at: more of them probably arrive."""

OnDisk = tuple[tuple[str, tuple[KeptLayers, ...]], ...]
"""See PeerInfo.on_disk."""


class KeptHere:
    """Reads which layers of models have KV or weights on the disk of this machine."""

    def __init__(self, settings: Settings, membership: Membership, catalogue: Catalogue, files: LocalFiles) -> None:
        self._membership = membership
        self._catalogue = catalogue
        self._files = files
        self._options = dict(settings.engine_options)
        self._turn = threading.Lock()
        self._kv: KeptKv | None = None
        self._weights: dict[str, tuple[int, tuple[str, list[KeptLayers]]]] = {}
        """By model: the time of its manifest, and what that led to."""
        if settings.prefix_disk is not None and settings.prefix_cache_bytes != 0:
            self._kv = KeptKv(settings.prefix_disk, _key(settings), self._is_usable, settings.prefix_disk_days)

    def read(self) -> OnDisk:
        """The layers on disk now, in an order that depends on nothing else. Blocking."""
        with self._turn:  # a first look that took too long may still run
            return self._read()

    def _read(self) -> OnDisk:
        found: dict[str, list[KeptLayers]] = {} if self._kv is None else self._kv.read()
        self._weights = {name: one for name in self._catalogue.partial_names if (one := self._weights_of(name))}
        for _, (digest, kept) in self._weights.values():
            found.setdefault(digest, []).extend(kept)
        kept_of = {digest[:DIGEST_CHARS]: tuple(sorted(kept[:MAX_KEPT])) for digest, kept in found.items() if kept}
        return tuple(sorted(list(kept_of.items())[:MAX_MODELS]))

    async def first_look(self) -> OnDisk:
        """The layers on disk; nothing if the look takes longer than FIRST_LOOK_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_S):
                return await asyncio.to_thread(self.read)
        return ()

    async def keep(self) -> None:
        """Publishes what has changed, until cancelled."""
        while True:
            if self._kv is not None or self._catalogue.partial_names or self._membership.own.on_disk:
                on_disk = await asyncio.to_thread(self.read)
                if on_disk != self._membership.own.on_disk:
                    self._membership.describe(replace(self._membership.own, on_disk=on_disk))
            await next_wakeup(LOOK_EVERY_S)

    def _is_usable(self, maker: KvMaker) -> bool:
        """Whether a stage that starts now would use the files of a maker."""
        engine = maker.version[1]
        try:
            version = provider(engine).version()
        except MeshError:
            return False  # the engine is not installed any more
        return maker.version == (__version__, engine, version) and dict(maker.options) == self._options

    def _weights_of(self, name: str) -> tuple[int, tuple[str, list[KeptLayers]]] | None:
        """The layers of a model whose weights are here although it has not all files; None if that is unknown."""
        before = self._weights.get(name)
        with contextlib.suppress(MeshError, OSError):
            changed_ns = (self._files.model_dir(name) / MANIFEST_FILE).stat().st_mtime_ns
            if (before is not None and before[0] == changed_ns) or time.time_ns() - changed_ns < SETTLED_S * 1e9:
                return before
            kept = [KeptLayers("", layers.start, layers.stop) for layers in self._files.whole_layers(name)]
            return changed_ns, (self._catalogue.local_card(name).digest, kept)
        return None


def _key(settings: Settings) -> bytes | None:
    if not settings.secret:
        return None
    from exo_mesh.security.keys import prefix_disk_key  # an open mesh avoids this slow import

    return prefix_disk_key(settings.secret)

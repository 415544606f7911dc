"""Sends the API keys of a closed mesh to its peers, so that every peer accepts every key and refuses removed ones.

A change of this node's file is sent to all peers at once. A peer that missed a change is detected by the digest of its
keys, which is part of its telemetry, and the two exchange the differences. Only salted hashes leave the node. In an
open mesh no key is sent or accepted, because any stranger could add one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence

from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.errors import InputError, MeshError
from exo_mesh.mesh.membership.calls import share_keys
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.security.api_keys import FILE_NAME, KeyFile
from exo_mesh.security.key_table import ApiKey, KeysById, missing, table_digest
from exo_mesh.settings.config import Settings

LOOK_EVERY_S = 0.5
"""A changed file is sent to the peers within this time."""
AT_ONCE = 16
"""Parallel calls when a change is sent to all peers."""

_log = logging.getLogger(__name__)


class KeySharing:
    """Keeps the API keys of this node equal to its peers' keys. file: the keys of this node. is_closed: whether the
    mesh has a secret."""

    def __init__(self, file: KeyFile, membership: Membership, *, is_closed: bool) -> None:
        self.file = file
        self._membership = membership
        self._is_closed = is_closed
        self._seen: KeysById | None = None
        self._shared: dict[str, ApiKey] = {}
        self._unsent: list[ApiKey] = []
        self._digest = 0
        self._compared: dict[str, int] = {}
        self._saving = asyncio.Lock()

    @classmethod
    def build(cls, settings: Settings, membership: Membership) -> KeySharing:
        """The key sharing for the key file in a node's home."""
        return cls(KeyFile(settings.home / FILE_NAME), membership, is_closed=bool(settings.secret))

    @property
    def digest(self) -> int:
        """Digest of the keys that this node holds; 0 before the first check of the file, and always in an open mesh."""
        return self._digest

    async def keep(self) -> None:
        """Until cancelled: send local changes, and compare keys with peers that differ. Returns at once in an open
        mesh."""
        while self._is_closed:
            try:
                self._look()
                if self._unsent:
                    changed, self._unsent = self._unsent, []
                    await self._send(changed)
                await self._compare()
            except OSError as exc:
                _log.warning("cannot read or share the API keys, retrying: %s", exc)
            await next_wakeup(LOOK_EVERY_S)

    async def compare(self, digest: int, received: Sequence[ApiKey] | None) -> tuple[int, list[ApiKey]]:
        """Take the keys that a peer sends or, if it sends none (None), compare its digest. Returns the digest of this
        node and, if the compared ones differ, its keys."""
        if not self._is_closed:
            raise InputError("API keys are shared only in a mesh with a secret; this mesh is open")
        self._look()
        if received is not None:
            await self._store(received)
            return self._digest, []
        return self._digest, list(self._shared.values()) if digest != self._digest else []

    def _look(self) -> None:
        """Queue changes of this node's key file for sending to the peers."""
        self._unsent += self._advance()

    def _advance(self) -> list[ApiKey]:
        """Share the current content of the file; returns the keys that are new or changed."""
        table = self.file.table
        if table is self._seen:
            return []
        self._seen = table
        before, self._shared = self._shared, {key.id: key for key in table.values() if key.is_well_formed}
        self._digest = table_digest(self._shared)
        return missing(self._shared, before)

    async def _store(self, received: Iterable[ApiKey]) -> None:
        self._look()
        if not (new := self.file.learn(received)):
            return
        self._advance()
        num_revoked = sum(bool(key.revoked) for key in new)
        _log.info("received API keys from the mesh: %d new, %d revoked", len(new) - num_revoked, num_revoked)
        try:
            async with self._saving:
                await asyncio.to_thread(self.file.save, new)
        except (OSError, InputError) as exc:
            _log.warning("cannot save the API keys from the mesh, so a restart would forget them: %s", exc)

    async def _send(self, keys: list[ApiKey]) -> None:
        """Send keys to all peers. A peer that misses them has another digest afterwards and is asked then."""
        turns = asyncio.Semaphore(AT_ONCE)

        async def send(peer: Peer) -> None:
            async with turns:
                with contextlib.suppress(MeshError):
                    await share_keys(self._membership.calls, peer.id, self._digest, keys)

        await asyncio.gather(*(send(peer) for peer in self._membership.peers))

    async def _compare(self) -> None:
        """Ask one peer whose last telemetry has another digest; at most once per telemetry reading."""
        for peer in self._membership.peers:
            sequence, digest = self._membership.keys_digest_of(peer.id)
            if digest in (0, self._digest):
                continue
            if sequence > self._compared.get(peer.id, 0):
                self._compared[peer.id] = sequence
                await self._ask(peer)
                break
        gone = [peer_id for peer_id in self._compared if not self._membership.is_alive(peer_id)]
        for peer_id in gone:
            del self._compared[peer_id]

    async def _ask(self, peer: Peer) -> None:
        try:
            calls = self._membership.calls
            digest, theirs = await share_keys(calls, peer.id, self._digest)
            await self._store(theirs)
            if digest != self._digest and (lacking := missing(self._shared, {key.id: key for key in theirs})):
                await share_keys(calls, peer.id, self._digest, lacking)
        except MeshError as exc:
            _log.debug("exchange of API keys with %s failed: %s", peer.info.name, exc)

"""Remembers peers that were connected before, to wake them: their MAC addresses, and which of them went to sleep."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.addresses import valid_macs
from exo_mesh.domain.device import PeerInfo
from exo_mesh.domain.peer_names import matching, peer_named

FILE_NAME = "known_peers.json"
MAX_KNOWN = 256
"""Most peers that are remembered; those seen longest ago are dropped first."""

MAX_FILE_BYTES = 512 * 1024
MAX_KNOWN_ADDRESSES = 16

_log = logging.getLogger(__name__)


class KnownPeer(msgspec.Struct, frozen=True):
    """A peer that was connected before. asleep_at: when it announced that it goes to sleep (Unix seconds); 0 if
    awake."""

    id: str
    name: str
    macs: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    asleep_at: float = 0.0


class KnownPeers:
    """The known peers; `version` rises with each change that should be saved."""

    def __init__(self) -> None:
        self._peers: dict[str, KnownPeer] = {}
        self.version = 0

    def met(self, info: PeerInfo) -> None:
        """Remember a connected peer, as awake."""
        self._put(KnownPeer(info.id, info.name, info.macs, info.addresses[:MAX_KNOWN_ADDRESSES]))

    def fell_asleep(self, peer_id: str, unix_s: float) -> None:
        """Record that a peer has announced that it goes to sleep."""
        if (peer := self._peers.get(peer_id)) is not None:
            self._put(replace(peer, asleep_at=unix_s))

    def named(self, text: str, own: PeerInfo) -> KnownPeer:
        """The known peer, or this node, that a person means. Raises as peer_named. Of several nodes of one machine, as
        after a new installation, the one seen last: waking the machine is the same for all of them."""
        known = [KnownPeer(own.id, own.name, own.macs), *self._peers.values()]
        found = matching(text, known)
        if found and found[0].macs and all(one.macs == found[0].macs for one in found):
            return found[-1]
        return peer_named(text, known)

    @property
    def is_empty(self) -> bool:
        return not self._peers

    @property
    def asleep(self) -> list[KnownPeer]:
        """Peers that announced that they go to sleep and have not returned."""
        return [one for one in self._peers.values() if one.asleep_at]

    @property
    def awake(self) -> list[KnownPeer]:
        """All other peers."""
        return [one for one in self._peers.values() if not one.asleep_at]

    def _put(self, peer: KnownPeer) -> None:
        if self._peers.get(peer.id) != peer:
            self.version += 1
        self._peers.pop(peer.id, None)
        self._peers[peer.id] = peer
        while len(self._peers) > MAX_KNOWN:
            del self._peers[next(iter(self._peers))]

    def read(self, path: Path) -> None:
        """Load the file of an earlier start; an unreadable file counts as empty, with a warning."""
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                return
            for raw in json.loads(path.read_text(encoding="utf-8")):
                self._put(_peer_from(raw))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
            _log.warning("cannot read %s, starting without known peers: %s", path, exc)
        self.version = 0

    def text(self) -> str:
        """The content of the file."""
        return json.dumps([msgspec.to_builtins(one) for one in self._peers.values()], indent=1)


def write_private(path: Path, text: str) -> None:
    """Replace a file by a file that only its user may read. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(fresh, path)


def _peer_from(raw: dict[str, object]) -> KnownPeer:
    return KnownPeer(
        str(raw["id"])[:64],
        str(raw["name"])[:256],
        valid_macs(_texts(raw["macs"])),
        tuple(_texts(raw["addresses"]))[:MAX_KNOWN_ADDRESSES],
        float(str(raw["asleep_at"])),
    )


def _texts(raw: object) -> Iterable[str]:
    if not isinstance(raw, list):
        raise ValueError("not a list")
    return [str(one)[:256] for one in raw]

"""Peers that were here once, for waking them: their MAC addresses, and which of them said that they go to sleep."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from exo_mesh.domain.addresses import valid_macs
from exo_mesh.domain.device import PeerInfo

FILE_NAME = "known_peers.json"
MAX_KNOWN = 256
"""The ones that were met longest ago are forgotten first."""

MAX_FILE_BYTES = 512 * 1024
MAX_KNOWN_ADDRESSES = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """asleep_at: when it said that it goes to sleep (Unix seconds); 0 if it is not asleep."""

    id: str
    name: str
    macs: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    asleep_at: float = 0.0


class KnownPeers:
    """`version` grows with each change that is worth writing down."""

    def __init__(self) -> None:
        self._peers: dict[str, KnownPeer] = {}
        self.version = 0

    def met(self, info: PeerInfo) -> None:
        """A peer is here, and awake."""
        self._put(KnownPeer(info.id, info.name, info.macs, info.addresses[:MAX_KNOWN_ADDRESSES]))

    def fell_asleep(self, peer_id: str, unix_s: float) -> None:
        """A peer has said that it goes to sleep."""
        if (peer := self._peers.get(peer_id)) is not None:
            self._put(replace(peer, asleep_at=unix_s))

    def find(self, wanted: str) -> KnownPeer | None:
        """By id, the first 8 characters of it, or name; of peers of one name the one that was met last."""
        found = [one for one in self._peers.values() if wanted in (one.id, one.id[:8], one.name)]
        return found[-1] if found else None

    @property
    def is_empty(self) -> bool:
        return not self._peers

    @property
    def asleep(self) -> list[KnownPeer]:
        """Those that said that they go to sleep, and have not come back."""
        return [one for one in self._peers.values() if one.asleep_at]

    def _put(self, peer: KnownPeer) -> None:
        if self._peers.get(peer.id) != peer:
            self.version += 1
        self._peers.pop(peer.id, None)
        self._peers[peer.id] = peer
        while len(self._peers) > MAX_KNOWN:
            del self._peers[next(iter(self._peers))]

    def read(self, path: Path) -> None:
        """Take in what an earlier start has written; a file that cannot be read is as none."""
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                return
            for raw in json.loads(path.read_text(encoding="utf-8")):
                self._put(_peer_from(raw))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
            _log.warning("%s: cannot be used: %s", path, exc)
        self.version = 0

    def text(self) -> str:
        """The content of the file."""
        return json.dumps([asdict(one) for one in self._peers.values()], indent=1)


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that only its user may read. Raises OSError."""
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

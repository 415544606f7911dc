"""What the mesh knows of the fetching of models: one record per peer and model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class DownloadState(StrEnum):
    """pending: it waits for its turn, or asks who has what. failed: `reason` says why, `remedy` what to do; it may be
    started again, and goes on from what is there."""

    PENDING = "pending"
    ONGOING = "ongoing"
    COMPLETED = "completed"
    FAILED = "failed"

    @property
    def is_active(self) -> bool:
        return self in (DownloadState.PENDING, DownloadState.ONGOING)


@dataclass(frozen=True, slots=True)
class FetchStep:
    """How far a fetch is: bytes that are there, of those that were asked for."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class DownloadInfo:
    """A download as the peer that fetches describes it.

    done_bytes, total_bytes: of all bytes that are wanted here, those that were there before included; total_bytes is 0
    until the fetch is planned.
    eta_s: seconds that are left, 0 if that is not known. layers: [start, stop) that it fetches. is_whole: all files,
    whatever engines need. from_hub_bytes, from_peers_bytes: what came from where in this download.
    """

    model: str
    state: DownloadState
    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0
    eta_s: float = 0.0
    layers: tuple[int, int] = (0, 0)
    is_whole: bool = False
    reason: str = ""
    remedy: str = ""
    from_hub_bytes: int = 0
    from_peers_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DownloadEntry(DownloadInfo):
    """A download of the mesh, and whose it is."""

    peer_id: str = ""
    peer_name: str = ""

    def describe(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "state": str(self.state), "layers": list(self.layers)}


def entry_of(peer_id: str, peer_name: str, info: DownloadInfo) -> DownloadEntry:
    return DownloadEntry(**asdict(info), peer_id=peer_id, peer_name=peer_name)

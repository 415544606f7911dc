"""Progress records of model downloads: one record per peer and model."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec

from exo_mesh.domain.fields import Cut, Else, SentAs
from exo_mesh.domain.health import MAX_TEXT


class DownloadState(StrEnum):
    """The state of a download. pending: it is queued, or asks peers which bytes they have. failed: `reason` and
    `remedy` explain it; it can be started again and then resumes."""

    PENDING = "pending"
    ONGOING = "ongoing"
    COMPLETED = "completed"
    FAILED = "failed"

    @property
    def is_active(self) -> bool:
        return self in (DownloadState.PENDING, DownloadState.ONGOING)


class FetchStep(msgspec.Struct, frozen=True):
    """Progress of a fetch in bytes: present, and requested in all."""

    done: int
    total: int


class DownloadInfo(msgspec.Struct, frozen=True):
    """A download as the fetching peer describes it.

    done_bytes, total_bytes: of all bytes that the peer wants, those that were present before included; total_bytes is 0
    until the fetch is planned. eta_s: estimated seconds left, 0 if unknown. layers: [start, stop) that it fetches.
    is_whole: all files are fetched, whatever the engines need. from_hub_bytes, from_peers_bytes: bytes by source in
    this download.
    """

    model: Annotated[str, Cut(256)]
    state: Annotated[DownloadState, Else(DownloadState.PENDING)]
    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0
    eta_s: float = 0.0
    layers: tuple[int, int] = (0, 0)
    is_whole: Annotated[bool, SentAs("whole")] = False
    reason: Annotated[str, Cut(MAX_TEXT)] = ""
    remedy: Annotated[str, Cut(MAX_TEXT)] = ""
    from_hub_bytes: int = 0
    from_peers_bytes: int = 0

    @property
    def is_fetching(self) -> bool:
        """Whether bytes are still missing; a download that only waits for the check of its files has all."""
        return self.state.is_active and not 0 < self.total_bytes <= self.done_bytes


class DownloadEntry(DownloadInfo, frozen=True):
    """A download in the mesh, with the peer that fetches."""

    peer_id: str = ""
    peer_name: str = ""

    def describe(self) -> dict[str, Any]:
        """Returns the entry as plain JSON values."""
        return {**msgspec.structs.asdict(self), "state": str(self.state), "layers": list(self.layers)}


def entry_of(peer_id: str, peer_name: str, info: DownloadInfo) -> DownloadEntry:
    return DownloadEntry(**msgspec.structs.asdict(info), peer_id=peer_id, peer_name=peer_name)

"""A download of a model to one peer, as every peer of the mesh sees it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DownloadState(StrEnum):
    """pending: waits for its turn. ongoing: bytes come. completed: all bytes are there. failed: see `reason`."""

    PENDING = "pending"
    ONGOING = "ongoing"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class DownloadEntry:
    """What one peer fetches, or has fetched, of one model.

    done_bytes: of total_bytes, those that were there before included. eta_s: None while nobody can say. layers: the
    half-open range [start, stop) whose bytes are wanted. is_whole: the whole model is wanted. remedy: what a person can
    do about a failure, "" if nothing is known.
    """

    peer_id: str
    peer_name: str
    model: str
    state: DownloadState
    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0
    eta_s: float | None = None
    layers: tuple[int, int] = (0, 0)
    is_whole: bool = False
    reason: str = ""
    remedy: str = ""
    from_hub_bytes: int = 0
    from_peers_bytes: int = 0

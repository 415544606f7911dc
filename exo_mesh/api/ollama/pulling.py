"""Follows the downloads of one model on all peers, and sums them up as the lines of /api/pull. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from exo_mesh.api.ollama.objects import OllamaProgress
from exo_mesh.domain.download import DownloadEntry, DownloadState
from exo_mesh.errors import FetchError

SETTLE_S = 2.0
"""Longest time until this node knows of downloads that other peers have started."""

SILENCE_S = 300.0
"""A pull whose downloads do not change for so long has failed; a download itself fails after a shorter silence."""


class PullPhase(Enum):
    """Whether the model is on its way, or there."""

    UNDER_WAY = "under way"
    DONE = "done"


class PullFollower:
    """Follows the downloads of one model. before: all downloads before the call. started: downloads that the node
    reported as started. now: in seconds, on any clock."""

    def __init__(
        self, model: str, digest: str, before: Iterable[DownloadEntry], started: Iterable[DownloadEntry], now: float
    ) -> None:
        self._model = model
        self._digest = digest
        self._before = {entry.peer_id: entry for entry in before if entry.model == model}
        self._seen = {entry.peer_id: entry for entry in started}
        self._started = set(self._seen)
        self._began = self._changed = now

    def take(self, entries: Iterable[DownloadEntry], now: float) -> PullPhase:
        """Take all downloads of the mesh as they are now. Raises FetchError if one of this model failed or was
        cancelled, or if nothing has changed for SILENCE_S."""
        is_settled = now - self._began >= SETTLE_S
        current = {
            entry.peer_id: entry
            for entry in entries
            if entry.model == self._model and not self._is_of_before(entry, is_settled=is_settled)
        }
        if any(self._seen.get(peer_id) != entry for peer_id, entry in current.items()):
            self._changed = now
        gone = [one for peer_id, one in self._seen.items() if one.state.is_active and peer_id not in current]
        self._seen |= current
        for entry in self._seen.values():
            if entry.state is DownloadState.FAILED:
                raise FetchError(f"{entry.peer_name} could not download it: {entry.reason}", remedy=entry.remedy)
        if gone and is_settled:
            raise FetchError(f"the download on {gone[0].peer_name} was cancelled", remedy="pull the model again")
        if now - self._changed >= SILENCE_S:
            raise FetchError(f"the download has not changed for {SILENCE_S:g} s", remedy="pull the model again")
        is_active = any(entry.state.is_active for entry in self._seen.values())
        return PullPhase.UNDER_WAY if is_active or not is_settled else PullPhase.DONE

    def _is_of_before(self, entry: DownloadEntry, *, is_settled: bool) -> bool:
        """Whether a download ended before the pull, unless its peer was started again and had nothing to do."""
        is_old = not entry.state.is_active and entry == self._before.get(entry.peer_id)
        return is_old and not (is_settled and entry.peer_id in self._started)

    def line(self) -> OllamaProgress:
        """The progress of all peers together."""
        total = sum(entry.total_bytes for entry in self._seen.values())
        done = sum(entry.done_bytes for entry in self._seen.values())
        status = f"pulling {self._digest[:12]}"
        if not total:
            return OllamaProgress(status=status)
        return OllamaProgress(status=status, digest=f"sha256:{self._digest}", total=total, completed=min(done, total))

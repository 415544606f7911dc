"""Counts the downloads of a node since its start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from exo_mesh.domain.fetch_plan import HUB


class DownloadTally:
    """The counts. received_bytes: by source: hub, peers, cache. running: current downloads. ended: by outcome: done,
    cancelled, failed. failed: by error code. files: completed files."""

    def __init__(self) -> None:
        self.received_bytes: Counter[str] = Counter()
        self.running = 0
        self.ended: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.files = 0

    def add(self, num_bytes: Mapping[str, int]) -> None:
        """Adds bytes by peer id, HUB for the hub."""
        from_hub = num_bytes.get(HUB, 0)
        self.received_bytes["hub"] += from_hub
        self.received_bytes["peers"] += sum(num_bytes.values()) - from_hub


class FetchTally:
    """Adds the progress of one fetch to the node's counts. Reports carry running sums, which may restart at zero."""

    def __init__(self, tally: DownloadTally) -> None:
        self._tally = tally
        self._counted: Mapping[str, int] = {}
        self._done = -1
        self._from_cache = 0

    def take(self, done: int, num_bytes: Mapping[str, int]) -> None:
        """Takes one report. done: bytes that are present. Bytes from no other machine count as this machine's cache."""
        if self._done < 0 or any(num_bytes.get(source, 0) < count for source, count in self._counted.items()):
            self._counted, self._done, self._from_cache = {}, done - sum(num_bytes.values()), 0
        self._tally.add({source: count - self._counted.get(source, 0) for source, count in num_bytes.items()})
        self._counted = dict(num_bytes)
        from_cache = max(self._from_cache, done - self._done - sum(num_bytes.values()))
        self._tally.received_bytes["cache"] += from_cache - self._from_cache
        self._from_cache = from_cache

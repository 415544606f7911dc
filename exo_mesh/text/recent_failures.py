"""Remembers for a minute which questions failed, so that the same one costs no process or compilation again."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from threading import Lock

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.errors import MeshError

KEPT_S = 60.0
MAX_KEPT = 256
"""Most failures that are remembered, of about 500 bytes each; the oldest are forgotten first."""


class RecentFailures:
    """Failures by the digest of their question. May be used from several threads."""

    def __init__(self, now: Clock = monotonic) -> None:
        self._now = now
        self._failed: OrderedDict[bytes, tuple[float, MeshError]] = OrderedDict()
        self._lock = Lock()

    def recall(self, question: bytes) -> None:
        """Raises the error with which the same question failed within KEPT_S, if it did."""
        with self._lock:
            while self._failed and next(iter(self._failed.values()))[0] < self._now() - KEPT_S:
                self._failed.popitem(last=False)
            known = self._failed.get(_digest(question)) if self._failed else None
        if known is not None:
            raise copy.copy(known[1])

    def note(self, question: bytes, error: MeshError) -> None:
        """Remember a failure. It must follow from the question alone."""
        with self._lock:
            key = _digest(question)
            self._failed.pop(key, None)
            self._failed[key] = self._now(), copy.copy(error)
            while len(self._failed) > MAX_KEPT:
                self._failed.popitem(last=False)


def _digest(question: bytes) -> bytes:
    return hashlib.blake2b(question, digest_size=16).digest()

"""Signs UDP announcements with the mesh's key; each is accepted once, within half a minute.

A sealed datagram is MAGIC, time (u64 little-endian, Unix milliseconds), nonce, HMAC-SHA256, payload; the HMAC covers
everything except itself.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum

MAGIC = b"exo-mesh sealed 1\n"
NONCE_BYTES = 12
MAC_BYTES = 32
MAX_AGE_S = 30.0
"""Largest clock difference between peers. A datagram received twice within this time is a replay."""
MAX_NONCES = 32_768
"""Nonces remembered: twice what 256 peers send within 2 * MAX_AGE_S over two interfaces. Only holders of the secret can
fill the list."""
REPORT_EVERY_S = 60.0

_HEAD = struct.Struct("<Q")
_SIGNED_HEAD_BYTES = len(MAGIC) + _HEAD.size + NONCE_BYTES


class DatagramVerdict(StrEnum):
    """The reason why a datagram was refused."""

    UNSIGNED = "not signed with this mesh's secret"
    STALE = "signed, but the clocks differ by more than 30 s"
    REPLAYED = "received before"
    SEALED = "signed with a secret, and this node has none"


class Seal:
    """Signs and verifies datagrams with one key. now: Unix time in seconds."""

    def __init__(self, key: bytes, now: Callable[[], float] = time.time) -> None:
        self._key = key
        self._now = now
        self._heard: OrderedDict[bytes, float] = OrderedDict()

    def close(self, payload: bytes) -> bytes:
        """The signed datagram to send. Sign a payload again for each send, because a copy counts as a replay."""
        head = MAGIC + _HEAD.pack(int(self._now() * 1000)) + secrets.token_bytes(NONCE_BYTES)
        return head + self._mac(head, payload) + payload

    def open(self, datagram: bytes) -> bytes | DatagramVerdict:
        """The payload, or the reason why it is refused."""
        head, rest = datagram[:_SIGNED_HEAD_BYTES], datagram[_SIGNED_HEAD_BYTES:]
        mac, payload = rest[:MAC_BYTES], rest[MAC_BYTES:]
        if not head.startswith(MAGIC) or not hmac.compare_digest(mac, self._mac(head, payload)):
            return DatagramVerdict.UNSIGNED
        now, sent = self._now(), _HEAD.unpack_from(head, len(MAGIC))[0] / 1000
        if abs(now - sent) > MAX_AGE_S:
            return DatagramVerdict.STALE
        nonce = head[-NONCE_BYTES:]
        if nonce in self._heard:
            return DatagramVerdict.REPLAYED
        self._remember(nonce, now)
        return payload

    def _remember(self, nonce: bytes, now: float) -> None:
        self._heard[nonce] = now
        # A nonce may be replayed while its time is accepted: up to MAX_AGE_S in the future, and MAX_AGE_S after that.
        while self._heard and (len(self._heard) > MAX_NONCES or next(iter(self._heard.values())) < now - 2 * MAX_AGE_S):
            self._heard.popitem(last=False)

    def _mac(self, head: bytes, payload: bytes) -> bytes:
        return hmac.digest(self._key, head + payload, hashlib.sha256)


class RefusedDatagrams:
    """Counts refused datagrams, and returns a summary line from time to time. now: a monotonic clock. what: the name
    of a datagram, for people."""

    def __init__(self, now: Callable[[], float] = time.monotonic, what: str = "announcement") -> None:
        self._now = now
        self._what = what
        self._due = float("-inf")
        self._unreported = 0
        self.total = 0

    def note(self, source: str, why: str) -> str:
        """Count one refusal. Returns the line to log, or "" if the last line was less than REPORT_EVERY_S ago."""
        self.total += 1
        self._unreported += 1
        if self._now() < self._due:
            return ""
        plural = "s" * (self._unreported > 1)
        line = f"refused {self._unreported} {self._what}{plural}, the last one from {source}: {why}"
        self._due, self._unreported = self._now() + REPORT_EVERY_S, 0
        return line

"""Encrypts probe datagrams with the mesh's key and refuses copies; in an open mesh they are sent as they are.

A sealed datagram is SEALED, salt, count (u64 big-endian), and the payload under ChaCha20-Poly1305, which also covers
what is before it. Each start of a node draws its own salt, and so has its own key; count is the nonce. No clock is
needed: a receiver remembers the highest count of each salt, and which of the WINDOW counts below it have arrived.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections import OrderedDict
from typing import TYPE_CHECKING

from exo_mesh.errors import TransportError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

OPEN = b"exo-mesh probe 1\n"
SEALED = b"exo-mesh probe s\n"
SALT_BYTES = 16
TAG_BYTES = 16
WINDOW = 64
"""How many datagrams of one sender may overtake another one without its being refused, as in IPsec (RFC 4303)."""

MAX_SALTS = 4096
"""Starts of nodes whose counts are remembered. Only holders of the secret can add one."""

_COUNT = struct.Struct(">Q")
_NONCE_HEAD = bytes(4)
_HEAD_BYTES = len(SEALED) + SALT_BYTES + _COUNT.size
OVERHEAD_BYTES = _HEAD_BYTES + TAG_BYTES
"""Bytes by which a sealed datagram is longer than its payload; an open one adds fewer."""


def seal_with(secret: str) -> ProbeSeal:
    """The seal of a node with this secret of the mesh; "" for an open mesh."""
    if not secret:
        return ProbeSeal(None)
    from exo_mesh.security.keys import probe_key  # an open mesh avoids this slow import

    return ProbeSeal(probe_key(secret))


class ProbeSeal:
    """Seals and opens the datagrams of one start of a node. key: 32 bytes, or None in an open mesh."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self._salt = secrets.token_bytes(SALT_BYTES)
        self._count = 0
        self._own = None if key is None else _cipher(key, self._salt)
        self._senders: OrderedDict[bytes, _Sender] = OrderedDict()

    def close(self, payload: bytes) -> bytes:
        """The datagram to send. Seal a payload again for each send, because a copy is refused."""
        if self._own is None:
            return OPEN + payload
        self._count += 1
        count = _COUNT.pack(self._count)
        head = SEALED + self._salt + count
        return head + self._own.encrypt(_NONCE_HEAD + count, payload, head)

    def open(self, datagram: bytes) -> bytes:
        """The payload. Raises TransportError if no node of this mesh sealed the datagram, if this node itself did, or
        if it was received before or is much older than another one of its sender."""
        if self._key is None:
            if not datagram.startswith(OPEN):
                raise TransportError("sealed with a secret, and this node has none" if _is_sealed(datagram)
                                     else "not a probe")  # fmt: skip
            return datagram[len(OPEN) :]
        if not _is_sealed(datagram) or len(datagram) < OVERHEAD_BYTES:
            raise TransportError("not sealed with the secret of this mesh")
        return self._opened(self._key, datagram)

    def _opened(self, key: bytes, datagram: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag  # an open mesh does not load the library

        head = datagram[:_HEAD_BYTES]
        salt, count = head[len(SEALED) : -_COUNT.size], head[-_COUNT.size :]
        sender = self._senders.get(salt) or _Sender(_cipher(key, salt))
        try:
            payload: bytes = sender.cipher.decrypt(_NONCE_HEAD + count, datagram[_HEAD_BYTES:], head)
        except InvalidTag as exc:
            raise TransportError("not sealed with the secret of this mesh") from exc
        if salt == self._salt or not sender.is_new(_COUNT.unpack(count)[0]):
            raise TransportError("received before")
        self._senders[salt] = sender
        self._senders.move_to_end(salt)
        if len(self._senders) > MAX_SALTS:
            self._senders.popitem(last=False)
        return payload


class _Sender:
    """What one start of a node has sent. highest: its highest count. seen: bit i is set if count highest - i
    arrived."""

    __slots__ = ("cipher", "highest", "seen")

    def __init__(self, cipher: ChaCha20Poly1305) -> None:
        self.cipher = cipher
        self.highest = 0
        self.seen = 0

    def is_new(self, count: int) -> bool:
        """Whether this count has not arrived before; records it."""
        if count > self.highest:
            self.seen = (self.seen << min(count - self.highest, WINDOW)) & (2**WINDOW - 1) | 1
            self.highest = count
            return True
        bit = 1 << (self.highest - count) if self.highest - count < WINDOW else 0
        is_new = bit != 0 and not self.seen & bit
        self.seen |= bit
        return is_new


def _is_sealed(datagram: bytes) -> bool:
    return datagram.startswith(SEALED)


def _cipher(key: bytes, salt: bytes) -> ChaCha20Poly1305:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(hmac.digest(key, salt, hashlib.sha256))

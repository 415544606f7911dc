"""Describes running answers, and decides who besides the asking client may see one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Annotated

import msgspec

from exo_mesh.domain.fields import NotSent


class StreamCard(msgspec.Struct, frozen=True):
    """A client's request while it runs. request_ids: of its choices, in their order.

    key_id: of the API key that it came with; "" without one. secret_hash: of a secret that only its client got. recipe:
    makes the bytes from which the API of any peer builds a reply from its events.
    """

    id: str
    model: str
    created: int
    request_ids: tuple[str, ...]
    key_id: str
    secret_hash: bytes
    recipe: Callable[[], bytes]


class StreamViewer(msgspec.Struct, frozen=True):
    """A caller that asks for running answers. key_id: of its API key, "" without one; None: may see all of them."""

    key_id: str | None
    secret_hash: bytes = b""

    def may_see(self, card: StreamCard) -> bool:
        """Whether the answer is the viewer's own: by its key, or by its secret if it came without a key."""
        if self.key_id is None:
            return True
        if card.key_id:
            return card.key_id == self.key_id
        return bool(self.secret_hash) and hmac.compare_digest(card.secret_hash, self.secret_hash)


class FoundStream(msgspec.Struct, frozen=True):
    """A running answer at its entry peer. recipe: empty unless the answer was asked for by its id."""

    peer_id: Annotated[str, NotSent()]
    id: str
    model: str
    created: int
    request_ids: tuple[str, ...]
    output_tokens: int
    recipe: bytes = b""
    key_id: str = ""


def hash_of_secret(secret: str) -> bytes:
    """The hash of a secret; b"" for no secret."""
    return (
        hashlib.sha256(f"exo-mesh stream secret\0{secret}".encode("utf-8", "surrogatepass")).digest() if secret else b""
    )

"""Running answers that others than the client that asked may see: what is known of one, and who may see it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from exo_mesh.domain.request import RequestEvent


@dataclass(frozen=True, slots=True)
class StreamCard:
    """A client's request while it runs. request_ids: of its choices, in their order.

    key_id: of the API key that it came with; "" without one. secret_hash: of what only its client was given.
    recipe: makes the bytes from which the API of any peer makes a reply of its events.
    """

    id: str
    model: str
    created: int
    request_ids: tuple[str, ...]
    key_id: str
    secret_hash: bytes
    recipe: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class StreamViewer:
    """Who asks for running answers. key_id: of the API key shown, "" without one; None: may see all of them."""

    key_id: str | None
    secret_hash: bytes = b""

    def may_see(self, card: StreamCard) -> bool:
        """Whether the answer is the viewer's own: by its key, or by its secret if it came without one."""
        if self.key_id is None:
            return True
        if card.key_id:
            return card.key_id == self.key_id
        return bool(self.secret_hash) and hmac.compare_digest(card.secret_hash, self.secret_hash)


@dataclass(frozen=True, slots=True)
class FoundStream:
    """A running answer at its entry peer. recipe: empty unless it was asked for by its id."""

    peer_id: str
    id: str
    model: str
    created: int
    request_ids: tuple[str, ...]
    output_tokens: int
    recipe: bytes = b""
    key_id: str = ""


class StreamService(Protocol):
    """The answers that run for clients of any peer."""

    def open(self, card: StreamCard) -> AbstractContextManager[None]:
        """While the context is open, a request that enters here can be found and read."""

    async def find(self, viewer: StreamViewer, stream_id: str = "") -> list[FoundStream]:
        """Those that the viewer may see, at all peers that answer, the newest first; with an id only that one."""

    def follow(self, found: FoundStream, viewer: StreamViewer, request_id: str) -> AsyncGenerator[RequestEvent, None]:
        """The events of one choice from the first on. Raises what it ends with, and TransportError if the peer at which
        it entered is lost."""


def hash_of_secret(secret: str) -> bytes:
    """b"" for no secret."""
    return (
        hashlib.sha256(f"exo-mesh stream secret\0{secret}".encode("utf-8", "surrogatepass")).digest() if secret else b""
    )

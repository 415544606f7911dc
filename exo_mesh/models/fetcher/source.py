"""The sources that a fetcher reads a model from: the hub, a local cache, or a peer. All calls block; thread-safe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from exo_mesh.models.file_server.listing import Listing

Sink = Callable[[memoryview], None]
"""Receives the next bytes, which are valid only during the call. Its exceptions end the read and reach the caller."""


class SourceError(OSError):
    """A read ended early; another attempt may continue from there. retry_after_s: the wait that the source asks for;
    None if it did not ask."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoRangesError(SourceError):
    """The source sends whole files only. A second call reads the file from the start and skips the unwanted bytes."""


class ModelFiles(Protocol):
    """One model at one source. Every method may be called from several threads at once."""

    peer: str
    """Id of the peer, "" for the hub."""

    def listing(self) -> Listing:
        """Lists the files. Raises FetchError, UnknownModelError if the source has no such model, and SourceError."""

    def read(self, file: str, start: int, stop: int, sink: Sink) -> None:
        """Passes the bytes `[start, stop)` of a file to the sink in order.

        Raises FetchError if this source refuses (is_final: no later attempt helps). Raises SourceError if it ends
        early; bytes that arrived were passed on, and a new read may start after them.
        """

    def close(self) -> None:
        """Closes the connections. Running reads fail soon."""

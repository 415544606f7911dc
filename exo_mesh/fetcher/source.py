"""What a fetcher reads a model from: the hub, a cache on this machine, or a peer. Blocking calls, from any thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from exo_mesh.files.listing import Listing

Sink = Callable[[memoryview], None]
"""Takes the next bytes; they are its own only during the call. What it raises ends the read and reaches the caller."""


class SourceError(OSError):
    """A read ended early. Another try may go on from there. retry_after_s: what the source asks to wait before that;
    None if it did not say."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoRangesError(SourceError):
    """The source sends whole files only. Asked again, it reads the file from the start and drops what comes before."""


class ModelFiles(Protocol):
    """One model at one source. Every method may be called from several threads at once."""

    peer: str
    """Id of the peer, "" for the hub."""

    def listing(self) -> Listing:
        """Raises FetchError, UnknownModelError if the source has no such model, and SourceError."""

    def read(self, file: str, start: int, stop: int, sink: Sink) -> None:
        """Hand over the bytes `[start, stop)` of a file in order.

        Raises FetchError if this source will not do (is_final: nor will any later try), and SourceError after what came
        was handed over; then a read may start where that ended.
        """

    def close(self) -> None:
        """Close its connections. Reads under way fail soon."""

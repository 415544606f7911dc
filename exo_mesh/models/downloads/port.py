"""The interface of the process that fetches, as this node's downloads use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from exo_mesh.models.fetcher.wire import NO_EDGES, HubModel, Share, Source, Word
from exo_mesh.models.fetching import OnBytes


class FileFetcher(Protocol):
    """The fetching process (exo_mesh.models.fetching.Fetcher). May raise FetchError, UnknownModelError, ModelError."""

    async def resolve(
        self,
        name: str,
        model_dir: Path,
        *,
        repo: str,
        revision: str,
        sources: Sequence[Source],
        trust_remote_code: bool = False,
    ) -> Mapping[str, int]:
        """Creates `model_dir` with config, tokenizer, headers and manifest of a model. Returns the bytes by source."""

    async def fetch(
        self, model_dir: Path, shares: Sequence[Share], on_progress: OnBytes | None = None
    ) -> Mapping[str, int]:
        """Fetches bytes into a directory that `resolve` created. Returns the bytes by source; cancelling ends it."""

    async def verify(
        self,
        model_dir: Path,
        files: Sequence[str],
        sources: Sequence[Source],
        on_wrong: Callable[[str], None],
        *,
        uses_hub: bool,
        word: Word = "",
        edges: Mapping[str, tuple[int, ...]] = NO_EDGES,
    ) -> tuple[str, ...]:
        """Compares files with their digests; returns the files that could not be checked. on_wrong: called with the
        name of a file with wrong bytes, before they are replaced. uses_hub: bytes that no peer has may be read from the
        hub only to check. word, edges: see Verify."""

    async def search(self, query: str, limit: int) -> Sequence[HubModel]:
        """Searches models on the hub."""

"""What the downloads of a node need of the process that fetches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from exo_mesh.fetcher.wire import HubModel, Share, Source
from exo_mesh.models.fetching import OnBytes


class FileFetcher(Protocol):
    """What fetches: exo_mesh.models.fetching.Fetcher. All may raise FetchError, UnknownModelError and ModelError."""

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
        """Make `model_dir` with config, tokenizer, headers and manifest of a model. Answers the bytes by source."""

    async def fetch(
        self, model_dir: Path, shares: Sequence[Share], on_progress: OnBytes | None = None
    ) -> Mapping[str, int]:
        """Bring bytes into a directory that `resolve` has made. Answers the bytes by source; cancelling ends it."""

    async def search(self, query: str, limit: int) -> Sequence[HubModel]:
        """Models of the hub."""

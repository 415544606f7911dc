"""Introduces a model to this node: fetches its config, tokenizer and headers, before any weight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from exo_mesh.errors import FetchError, ModelError, UnknownModelError
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.downloads.records import DownloadRecords
from exo_mesh.models.downloads.sources import ModelSources
from exo_mesh.models.downloads.use import ModelUse
from exo_mesh.models.fetcher.wire import Source
from exo_mesh.models.fetching import Fetcher
from exo_mesh.models.local_files import LocalFiles
from exo_mesh.weights.fetched import MANIFEST_FILE


class ModelHeaders:
    """Makes the directory of a model from the hub or from peers, unless the model is here."""

    def __init__(
        self,
        catalogue: Catalogue,
        files: LocalFiles,
        fetcher: Fetcher,
        sources: ModelSources,
        use: ModelUse,
        records: DownloadRecords,
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        """on_change: publishes which models are here now."""
        self._catalogue = catalogue
        self._files = files
        self._fetcher = fetcher
        self._sources = sources
        self._use = use
        self._records = records
        self._on_change = on_change

    async def from_hub(self, name: str, repo: str, revision: str, *, allows_code: bool = False) -> None:
        """See Downloads.resolve."""
        self._sources.rules.require(from_hub=True)
        await self._introduce(name, repo, revision, [Source()], allows_code=allows_code)

    async def from_peers(self, name: str, digest: str) -> None:
        """See Downloads.introduce."""
        if await self._is_here(name, digest):
            await asyncio.to_thread(self._files.touch, name)
            return
        self._sources.rules.require(from_hub=False)
        found = [(peer, holding) for peer, holding in await self._sources.holdings(name) if holding.digest == digest]
        if not found:
            raise FetchError(f"no reachable peer serves the files of {name}")
        _, first = found[0]
        await self._introduce(name, first.repo, first.revision, [self._sources.source(peer) for peer, _ in found])
        if not await self._is_here(name, digest):
            raise FetchError(f"the files of {name} that peers sent cannot be used")

    async def _is_here(self, name: str, digest: str) -> bool:
        try:
            card = await asyncio.to_thread(self._catalogue.local_card, name)
        except UnknownModelError:
            return False
        if card.digest != digest:
            raise ModelError(
                f"the files of {name} here have digest {card.digest[:12]}, not {digest[:12]}: the peers hold different "
                "versions of the model"
            )
        return True

    async def _introduce(
        self, name: str, repo: str, revision: str, sources: Sequence[Source], *, allows_code: bool = False
    ) -> None:
        target = self._files.target(name)
        async with self._use.turn(name):
            if not await asyncio.to_thread(_is_model, target):
                num_bytes = await self._fetcher.resolve(
                    name, target, repo=repo, revision=revision, sources=sources, trust_remote_code=allows_code
                )
                self._records.tally.add(num_bytes)
                if not await asyncio.to_thread(_is_model, target):  # the fetcher never overwrites what is there
                    raise FetchError(
                        f"the directory of {name} among the fetched models holds files that are not a model",
                        remedy="move these files away", is_final=True,
                    )  # fmt: skip
                await asyncio.to_thread(self._files.touch, name, store=self._sources.store.staged_from(name))
                await self._on_change()


def _is_model(model_dir: Path) -> bool:
    return (model_dir / "config.json").exists() or (model_dir / MANIFEST_FILE).exists()

"""The parts of a node that know models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from exo_mesh.engine.registry import Registry
from exo_mesh.machine.disk import Disk
from exo_mesh.membership.service import Membership
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.downloads import Downloads, FetchRules
from exo_mesh.models.file_exchange import FileExchange
from exo_mesh.models.local_files import LocalFiles
from exo_mesh.models.mixing import Mixing
from exo_mesh.models.selftests import SelfTests
from exo_mesh.models.surveys import Surveys
from exo_mesh.models.text_cache import TextCache
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.settings.config import Settings
from exo_mesh.weights.store import ModelStore


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Which models there are, how more get here, their text files, and what engines say of them, alone and together."""

    catalogue: Catalogue
    exchange: FileExchange
    downloads: Downloads
    surveys: Surveys
    self_tests: SelfTests
    texts: TextCache
    mixing: Mixing

    @staticmethod
    def at(
        settings: Settings,
        registry: Registry,
        membership: Membership,
        disk: Disk,
        credentials: CredentialSource | None,
        on_change: Callable[[], Awaitable[None]],
    ) -> ModelParts:
        """on_change: tells the mesh which models are here now."""
        home, options = settings.home, settings.engine_options
        root = home / "models"
        catalogue = Catalogue(ModelStore(tuple(dict.fromkeys((*settings.models_dirs, root)))), membership)
        exchange = FileExchange(settings, catalogue, credentials, disk.floor_bytes)
        files = LocalFiles(root, catalogue.local_card, catalogue.local_dir, disk)
        rules = FetchRules(
            ("peers" if settings.offline else "hub") if settings.fetch else "",
            settings.models_max_bytes,
            settings.evict_pinned,
            "http" if credentials is None else "https",
        )
        downloads = Downloads(membership, catalogue, files, exchange.fetcher, disk, rules, on_change)
        surveys = Surveys(registry, catalogue, membership, home / "surveys", disk=disk, options=options)
        self_tests = SelfTests(registry, catalogue, options, home / "scratch", disk=disk, bring=downloads.bring)
        texts = TextCache(home / "text", catalogue, membership, disk)
        mixing = Mixing(membership, surveys, self_tests, home / "selftests", disk)
        return ModelParts(catalogue, exchange, downloads, surveys, self_tests, texts, mixing)

"""The parts of a node that know models."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.engine.registry import Registry
from exo_mesh.machine.disk import Disk
from exo_mesh.membership.service import Membership
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.mixing import Mixing
from exo_mesh.models.selftests import SelfTests
from exo_mesh.models.surveys import Surveys
from exo_mesh.models.text_cache import TextCache
from exo_mesh.settings.config import Settings
from exo_mesh.weights.store import ModelStore


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Which models there are, their text files, and what engines say of them, alone and together."""

    catalogue: Catalogue
    surveys: Surveys
    self_tests: SelfTests
    texts: TextCache
    mixing: Mixing

    @staticmethod
    def at(settings: Settings, registry: Registry, membership: Membership, disk: Disk) -> ModelParts:
        home, options = settings.home, settings.engine_options
        catalogue = Catalogue(ModelStore(settings.models_dirs), membership)
        surveys = Surveys(registry, catalogue, membership, home / "surveys", disk=disk, options=options)
        self_tests = SelfTests(registry, catalogue, options, home / "scratch", disk=disk)
        texts = TextCache(home / "text", catalogue, membership, disk)
        mixing = Mixing(membership, surveys, self_tests, home / "selftests", disk)
        return ModelParts(catalogue, surveys, self_tests, texts, mixing)

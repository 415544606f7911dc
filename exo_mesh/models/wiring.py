"""Builds the parts of a node that deal with models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.domain.whole.served import ServedModel
from exo_mesh.engine.registry import Registry
from exo_mesh.machine.disk import Disk
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models import calls
from exo_mesh.models.cards.card_store import CardStore, shipped_cards
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.downloads.checks import OnWrong
from exo_mesh.models.downloads.rules import FetchRules
from exo_mesh.models.downloads.service import Downloads
from exo_mesh.models.engine_speeds import EngineSpeeds
from exo_mesh.models.fetches_for_peers import FetchesForPeers
from exo_mesh.models.file_exchange import FileExchange
from exo_mesh.models.local_files import LocalFiles
from exo_mesh.models.mesh_store import StoreRules
from exo_mesh.models.mixed_ring_test import MixedRingTest
from exo_mesh.models.profiles import Profiles
from exo_mesh.models.selftests import SelfTests
from exo_mesh.models.served import OnReports, ServedModels
from exo_mesh.models.server_options import server_options, with_card
from exo_mesh.models.surveys import Surveys
from exo_mesh.models.text_cache import TextCache
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.settings.config import Settings
from exo_mesh.text.text_files import check_text_files
from exo_mesh.weights.store import ModelStore
from exo_mesh.wire.peer_call import AnyAnswer, CallAnswer, StreamAnswer, answer

LOOK_EVERY_S = 10.0

SHIPPED_AFTER_S = 1.0
"""The shipped cards are read this long after the start, unless they are needed before: reading takes some 20 ms."""

RESUME_AFTER_S = 5.0
"""Unfinished pulls resume this long after the start, or as soon as a peer is known: it may have the files."""


class ModelParts(msgspec.Struct, frozen=True):
    """The parts of a node that deal with models: names, downloads, text files, and what engines know about models."""

    catalogue: Catalogue
    files: LocalFiles
    exchange: FileExchange
    downloads: Downloads
    surveys: Surveys
    self_tests: SelfTests
    texts: TextCache
    mixing: MixedRingTest
    shelf: CardStore
    profiles: Profiles
    served: ServedModels
    speeds: EngineSpeeds

    def server_options(self, model: ServedModel) -> dict[str, str]:
        """The settings of a whole-model engine for a model that it serves here, with what the model's card says."""
        card = self.shelf.card(model.name) or self.shelf.card(model.stands_for)
        return with_card(self.served.options(model.engine), card)

    async def keep_cards(self) -> None:
        """Reads the card files and the chat templates of new models every LOOK_EVERY_S, for ever."""
        await self.shelf.rescan()
        await asyncio.sleep(SHIPPED_AFTER_S)
        await asyncio.to_thread(shipped_cards)
        while True:
            await self.profiles.learn()
            await next_wakeup(LOOK_EVERY_S)
            await self.shelf.rescan()

    async def resume_pulls(self, membership: Membership) -> None:
        """Resumes the pulls that were unfinished when this node ended. Without a hub it waits for a peer."""
        loop = asyncio.get_running_loop()
        resume_at = loop.time() + RESUME_AFTER_S
        while not membership.peers and (self.downloads.rules.fetches != "hub" or loop.time() < resume_at):
            await membership.changed.wait(1.0)
        await self.downloads.resume_pulls()

    def answers(self, own_name: str, *, obeys_peers: bool) -> list[AnyAnswer]:
        """This node's answers to calls about models. obeys_peers: see FetchesForPeers."""
        catalogue, downloads = self.catalogue, self.downloads
        fetches = FetchesForPeers(downloads, self.shelf, own_name, obeys_peers=obeys_peers)
        return [
            answer(calls.DESCRIBE_MODEL, partial(calls.answer_describe_model, catalogue.file_card, self.surveys.here)),
            answer(calls.SELF_TEST, partial(calls.answer_self_test, self.self_tests.run)),
            StreamAnswer(calls.READ_TEXT_FILES, partial(calls.answer_read_text_files, catalogue.local_dir)),
            CallAnswer(calls.INTRODUCE, partial(calls.answer_introduce, fetches.introduce)),
            answer(calls.DESCRIBE_FILES, partial(calls.answer_describe_files, downloads.holding)),
            CallAnswer(calls.PULL, partial(calls.answer_pull, fetches.pull)),
            answer(calls.DROP_MODEL, partial(calls.answer_drop_model, downloads.drop)),
            answer(calls.DELETE_CARD, partial(calls.answer_delete_card, self.shelf.delete_own)),
        ]

    @staticmethod
    def build(
        settings: Settings,
        registry: Registry,
        membership: Membership,
        disk: Disk,
        credentials: CredentialSource | None,
        on_change: Callable[[], Awaitable[None]],
        on_reports: OnReports,
        on_wrong: OnWrong,
    ) -> ModelParts:
        """on_change: publishes which models are here now. on_reports: see ServedModels. on_wrong: see FileChecks."""
        home, options = settings.home, settings.engine_options
        directories = (*filter(None, [settings.custom_model_cards_dir]), home / "cards")
        shelf = CardStore(directories, membership, disk, allow_code=settings.trust_remote_code)
        store = StoreRules.of(settings, membership.own)
        root = settings.store if store.is_here and settings.store is not None else home / "models"
        places = dict.fromkeys((*settings.models_dirs, root, home / "models"))
        served = ServedModels(registry, membership, server_options(settings, registry), on_reports)
        views = None if settings.llama_server else home / "gguf"  # else the llama-server has the GGUF files
        catalogue = Catalogue(
            ModelStore(tuple(places), views_dir=views, check=check_text_files), membership, shelf, served
        )
        exchange = FileExchange(settings, catalogue, credentials, disk.floor_bytes, root)
        files = LocalFiles(root, catalogue.local_card, catalogue.local_dir, disk, is_store=store.is_here)
        rules = FetchRules(
            ("peers" if settings.offline else "hub") if settings.fetch else "",
            settings.models_max_bytes,
            settings.evict_pinned,
            "http" if credentials is None else "https",
            store,
        )
        downloads = Downloads(membership, catalogue, files, exchange.fetcher, disk, rules, on_change, on_wrong)
        surveys = Surveys(registry, catalogue, membership, home / "surveys", disk=disk, options=options)
        self_tests = SelfTests(registry, catalogue, options, home / "scratch", disk=disk, bring=downloads.bring)
        texts = TextCache(home / "text", catalogue, membership, disk)
        mixing = MixedRingTest(membership, surveys, home / "selftests", disk)
        profiles = Profiles(catalogue, shelf, texts)
        is_on = settings.measure_engines == "on"
        speeds = EngineSpeeds(registry, catalogue, home / "speeds", disk, options, is_on=is_on)
        return ModelParts(
            catalogue, files, exchange, downloads, surveys, self_tests, texts, mixing, shelf, profiles, served, speeds
        )

"""Asks engines what they know about a model before they load it: in a short-lived child process, cached on disk."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.whole.served import SERVED_ARCHITECTURE
from exo_mesh.engine.contract import ModelSurvey, Surveyor
from exo_mesh.engine.registry import Registry
from exo_mesh.errors import EngineError, MeshError, ModelError, UnknownModelError
from exo_mesh.machine.disk import Disk
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.calls import SURVEY_S, survey_model
from exo_mesh.models.card_json import survey_from_json
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.engine_child import ask_child
from exo_mesh.weights.store import SHIPPED

SURVEY_COMMAND: tuple[str, ...] = (sys.executable, "-m", "exo_mesh.rings.runner.asking.survey", "--tied")

MAX_KEPT = 512
"""Most answers on disk and in memory: one per model, engine, version and options; the oldest are deleted first."""

UNABLE_S = 60.0
"""How long the answer "cannot run it" is cached: the files may just not have been complete."""

_log = logging.getLogger(__name__)


def as_held(card: ModelCard, survey: ModelSurvey) -> ModelCard:
    """Returns the card of a model as an engine holds it; figures that the survey leaves open come from the files."""
    held = replace(
        card,
        legal_cuts=survey.legal_cuts,
        kv_layer_bytes=survey.kv_bytes_per_token,
        kv_fixed_bytes=survey.kv_fixed_bytes,
    )
    if not survey.layer_bytes:
        return held
    return replace(held, layer_bytes=survey.layer_bytes, embed_bytes=survey.embed_bytes, head_bytes=survey.head_bytes)


class Surveys:
    """Answers for this machine, and asks a peer about models and engines that only other peers have."""

    def __init__(
        self,
        registry: Registry,
        catalogue: Catalogue,
        membership: Membership,
        cache_dir: Path,
        command: Sequence[str] = SURVEY_COMMAND,
        disk: Disk | None = None,
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """options: the engine settings with which this node loads stages."""
        self._disk = disk or Disk(cache_dir)
        self._registry = registry
        self._catalogue = catalogue
        self._membership = membership
        self._cache_dir = cache_dir
        self._command = command
        self._options = json.dumps(dict(sorted(options.items())))
        self._known: dict[tuple[str, str], ModelSurvey] = {}
        self._unable: dict[tuple[str, str], tuple[ModelError, float]] = {}
        self._turn = asyncio.Lock()

    async def of(self, card: ModelCard, engine: str) -> ModelSurvey:
        """Returns what an engine reports about a model. Unknown figures come from the files; loading checks all.

        Raises ModelError if the engine reports that it cannot run the model.
        """
        if card.architecture == SERVED_ARCHITECTURE:
            return ModelSurvey((), "its server runs it whole")
        key = (card.digest, engine)
        now = asyncio.get_running_loop().time()
        failure, until = self._unable.get(key, (None, 0.0))
        if failure is not None and now < until:
            raise failure
        if key not in self._known:
            try:
                self._known[key] = await self._find(card, engine)
            except ModelError as exc:
                self._unable[key] = (exc, now + UNABLE_S)
                forget_oldest(self._unable, MAX_KEPT)
                raise
            except MeshError as exc:
                _log.warning("no survey by %s of %s: %s", engine, card.name, exc)
                return ModelSurvey(card.legal_cuts)
            forget_oldest(self._known, MAX_KEPT)
        return self._known[key]

    async def here(self, card: ModelCard, engine: str) -> ModelSurvey:
        """Returns what this machine's engine reports.

        Raises UnknownModelError without the model's files, EngineError without an answer, ModelError if the engine
        cannot run it.
        """
        provider = self._registry.providers.get(engine)
        if provider is None or not provider.availability().available:
            raise EngineError(f"engine {engine} cannot run here")
        if not isinstance(provider, Surveyor) or card.name == SHIPPED:
            return ModelSurvey(card.legal_cuts)  # a test asks each engine about the shipped model instead
        model_dir = await asyncio.to_thread(self._catalogue.local_dir, card.name)
        version = re.sub(r"[^A-Za-z0-9.]+", "-", f"{engine}-{provider.version()}")[:64]
        settings = hashlib.sha256(self._options.encode()).hexdigest()[:8]
        kept = self._cache_dir / f"{card.digest[:32]}-{version}-{settings}.json"
        async with self._turn:  # one child at a time; later callers find the first one's answer
            survey = await asyncio.to_thread(_read, kept, card.num_layers)
            if survey is None:
                survey = await self._ask_child(card, engine, model_dir)
                if survey.legal_cuts:  # "in one piece only" may also mean that a file is not complete yet
                    text = json.dumps(msgspec.to_builtins(survey))
                    await asyncio.to_thread(write_kept, self._disk, kept, text, "what engines say of models", MAX_KEPT)
        return survey

    async def _find(self, card: ModelCard, engine: str) -> ModelSurvey:
        try:
            return await self.here(card, engine)
        except (UnknownModelError, EngineError) as exc:
            failure: MeshError = exc
        for peer in self._membership.peers:
            if peer.info.knows(card.name) and engine in peer.info.engines:
                try:
                    survey = await survey_model(self._membership.calls, peer.id, card, engine)
                    if survey is not None:
                        return survey
                except MeshError as exc:
                    failure = exc
        raise failure

    async def _ask_child(self, card: ModelCard, engine: str, model_dir: Path) -> ModelSurvey:
        what = f"engine {engine} cannot survey {card.name}"
        answer = await ask_child([*self._command, engine, str(model_dir), self._options], SURVEY_S, what)
        if "unable" in answer:
            raise ModelError(str(answer["unable"]))
        if not isinstance(answer.get("survey"), dict):
            raise EngineError(f"{what}: {answer.get('error')}")
        survey = survey_from_json(json.dumps(answer["survey"]).encode(), card.num_layers)
        if not survey.legal_cuts:
            _log.info("%s cannot be split over peers: %s", card.name, survey.reason)
        return survey


def forget_oldest(entries: dict[Any, Any], most: int) -> None:
    """Keeps at most so many entries."""
    while len(entries) > most:
        del entries[next(iter(entries))]


def _read(file: Path, num_layers: int) -> ModelSurvey | None:
    try:
        return survey_from_json(file.read_bytes(), num_layers)
    except (OSError, ModelError):
        return None


def write_kept(disk: Disk, file: Path, text: str, what: str, max_files: int) -> None:
    """Writes a cache file if there is room for it, and deletes the oldest of more than `max_files` files beside it."""
    if not disk.write(file, text, what):
        return
    with contextlib.suppress(OSError):
        ages = {path: path.stat().st_mtime_ns for path in file.parent.glob("*.json")}
        for path in sorted(ages, key=ages.__getitem__)[: max(0, len(ages) - max_files)]:
            path.unlink(missing_ok=True)

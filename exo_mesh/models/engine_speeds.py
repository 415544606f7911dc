"""Measures how fast each engine of this machine runs a model: in a short-lived child process, once, kept on disk."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from exo_mesh.base.tasks import TaskOwner
from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.domain.device import Device
from exo_mesh.domain.engine_speed import DIGEST_CHARS, EngineSpeed, ModelSpeeds, fastest_first
from exo_mesh.domain.model import ModelCard
from exo_mesh.engine.registry import Registry
from exo_mesh.errors import EngineError, MeshError
from exo_mesh.machine.disk import Disk
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.engine_child import ask_child
from exo_mesh.models.surveys import forget_oldest, write_kept

SPEED_COMMAND: tuple[str, ...] = (sys.executable, "-m", "exo_mesh.rings.runner.asking.layer_speed", "--tied")

MEASURE_S = 120.0
"""Deadline of one measurement: importing a library, loading a few layers three times, and some seconds of work."""

QUIET_S = 10.0
"""How long no request may have run on this machine before a measurement starts."""

LOOK_EVERY_S = 2.0
"""Time between two looks for models to measure, and for a quiet machine."""

STOP_WITHIN_S = 0.25
"""A measurement that runs while a request arrives is ended within this time, and repeated later."""

MAX_KEPT = 256
"""Most measurements on disk, and most models in memory and in the list of wishes; the oldest are dropped first."""

MAX_PUBLISHED = 32
"""Most models whose speeds this node publishes to its peers."""

RETRY_S, LAST_RETRY_S = 60.0, 3600.0
"""When a model is looked at again that could not be measured for lack of memory or complete files, or because other
programs used the machine. The time doubles with each further look, up to the maximum."""

ROOM_BYTES = 2 * 2**30
"""Memory that must be free: the longest slice, as some engines hold it in float32, and an engine's library."""

VERSION = 1
"""Of the measurement; files of another version are ignored."""

_log = logging.getLogger(__name__)


class _Measurement(msgspec.Struct, frozen=True):
    """A measurement on disk. setup: a digest of everything besides the model that the figures depend on. speed: None
    if the engine failed, for the reason `error`."""

    model: str
    digest: str
    engine: str
    num_layers: int
    setup: str
    speed: EngineSpeed | None = None
    error: str = ""


class SpeedNeeds(msgspec.Struct, frozen=True):
    """What EngineSpeeds needs from the node. engines_for: the engines for a model and architecture, in the order of
    preference. is_busy: whether requests run or ran a moment ago. room_bytes: memory that a new stage could get.
    placed: name and digest of each placed model of the mesh. device: this machine; it may be unknown until the start.
    on_news: publishes new figures."""

    engines_for: Callable[[str, str], tuple[str, ...]]
    is_busy: Callable[[], bool]
    room_bytes: Callable[[], int]
    placed: Callable[[], Sequence[tuple[str, str]]]
    device: Callable[[], Device | None]
    on_news: Callable[[], Awaitable[None]]


class EngineSpeeds:
    """The measured speeds on this machine. Measures a model after it was placed in the mesh or asked for in a preview.

    A measurement never runs beside requests, and nothing waits for one.
    """

    def __init__(
        self,
        registry: Registry,
        catalogue: Catalogue,
        cache_dir: Path,
        disk: Disk,
        options: Mapping[str, str],
        *,
        is_on: bool = True,
        command: Sequence[str] = SPEED_COMMAND,
        quiet_s: float = QUIET_S,
        look_s: float = LOOK_EVERY_S,
    ) -> None:
        """options: the engine settings with which this node loads stages."""
        self._registry = registry
        self._catalogue = catalogue
        self._cache_dir = cache_dir
        self._disk = disk
        self._options = json.dumps(dict(sorted(options.items())))
        self._is_on = is_on
        self._command = command
        self._quiet_s = quiet_s
        self._look_s = look_s
        self._found: dict[str, dict[str, _Measurement]] = {}  # by digest, by engine
        self._digests: dict[str, str] = {}  # by name
        self._wishes: dict[str, str] = {}  # digest by name
        self._settled: set[str] = set()  # digests with nothing left to measure
        self._later: dict[str, tuple[float, float]] = {}  # by digest: when to look again, and the pause before that
        self._tasks = TaskOwner()
        self.is_measuring = False

    def wish(self, card: ModelCard) -> None:
        """Have a model measured when this machine is quiet, if its files are here."""
        if self._is_on and card.digest not in self._settled:
            self._wishes[card.name] = card.digest
            forget_oldest(self._wishes, MAX_KEPT)

    def measured(self, digest: str) -> Mapping[str, EngineSpeed | None]:
        """By engine: the speed, or None if the measurement failed. Engines that were not measured are missing."""
        return {engine: kept.speed for engine, kept in self._found.get(digest, {}).items()}

    def ordered(self, model: str, engines: tuple[str, ...], num_chosen: int = 0) -> tuple[str, ...]:
        """Orders engines for a model by measured speed. The first `num_chosen` were chosen by the operator and stay."""
        kept = self._found.get(self._digests.get(model, ""), {})
        took = {
            engine: None if one.speed is None else one.speed.request_s(one.num_layers) for engine, one in kept.items()
        }
        return (*engines[:num_chosen], *fastest_first(engines[num_chosen:], took))

    def published(self) -> ModelSpeeds:
        """The speeds of the models that were measured last, for the peers."""
        found = [
            (
                digest[:DIGEST_CHARS],
                tuple((engine, one.speed) for engine, one in sorted(kept.items()) if one.speed is not None),
            )
            for digest, kept in self._found.items()
        ]
        return tuple(item for item in found if item[1])[-MAX_PUBLISHED:]

    async def keep(self, needs: SpeedNeeds) -> None:
        """While this machine is idle, measures requested and placed models. Runs until cancelled; returns at once if
        measuring is off."""
        if not self._is_on:
            return
        await asyncio.to_thread(self._read_all, needs)
        if self._found:
            await needs.on_news()
        loop = asyncio.get_running_loop()
        quiet_at = loop.time() + self._quiet_s
        try:
            while True:
                await next_wakeup(self._look_s)
                if needs.is_busy():
                    quiet_at = loop.time() + self._quiet_s
                elif loop.time() >= quiet_at and (card := await self._next(needs)) is not None:
                    await self._measure_model(card, needs)
        finally:
            await self._tasks.close()

    async def _next(self, needs: SpeedNeeds) -> ModelCard | None:
        """The next model to measure, if its files are here and there is memory."""
        now = asyncio.get_running_loop().time()
        local = set(self._catalogue.local_names)
        for name, digest in {**dict(needs.placed()), **self._wishes}.items():
            if name not in local or digest in self._settled or self._later.get(digest, (0.0, 0.0))[0] > now:
                continue
            try:
                card = await asyncio.to_thread(self._catalogue.local_card, name)
            except MeshError:
                card = None
            if card is None or card.digest != digest or needs.room_bytes() < ROOM_BYTES:
                self._put_off(digest)
                continue
            return card
        return None

    def _put_off(self, digest: str) -> None:
        _, pause_s = self._later.pop(digest, (0.0, RETRY_S / 2))
        pause_s = min(2 * pause_s, LAST_RETRY_S)
        self._later[digest] = (asyncio.get_running_loop().time() + pause_s, pause_s)
        forget_oldest(self._later, MAX_KEPT)

    async def _measure_model(self, card: ModelCard, needs: SpeedNeeds) -> None:
        """Measures each engine that was not measured, until all are or requests arrive."""
        setups = {engine: self._setup(engine, needs) for engine in self._engines(card, needs)}
        self._digests[card.name] = card.digest
        forget_oldest(self._digests, MAX_KEPT)
        for engine, setup in setups.items():
            kept = self._found.setdefault(card.digest, {})
            if engine in kept:
                continue
            result = await self._measure(card, engine, setup, needs)
            if result is None:
                return
            kept[engine] = result
            forget_oldest(self._found, MAX_KEPT)
            await needs.on_news()
        self._wishes.pop(card.name, None)
        if len(self._settled) >= MAX_KEPT:
            self._settled.clear()
        self._settled.add(card.digest)

    async def _measure(self, card: ModelCard, engine: str, setup: str, needs: SpeedNeeds) -> _Measurement | None:
        """The result of one measurement; None if requests or other programs disturbed it."""
        directory = await asyncio.to_thread(self._catalogue.local_dir, card.name)
        asking = self._tasks.start(self._ask(card, engine, setup, directory), f"measurement of {engine}")
        self.is_measuring = True
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=STOP_WITHIN_S)
                if needs.is_busy() and not asking.done():
                    _log.info("stopped measuring %s with %s, because requests arrived", engine, card.name)
                    return None
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})
            self.is_measuring = False
        result: _Measurement | None = asking.result()
        if result is None:
            self._put_off(card.digest)
            return None
        if result.speed is not None:
            name = f"{card.digest[:DIGEST_CHARS]}-{re.sub(r'[^A-Za-z0-9]+', '-', engine)[:32]}-{setup}.json"
            text = msgspec.json.encode(result).decode()
            await asyncio.to_thread(write_kept, self._disk, self._cache_dir / name, text, "speeds of engines", MAX_KEPT)
        return result

    async def _ask(self, card: ModelCard, engine: str, setup: str, directory: Path) -> _Measurement | None:
        what = f"measuring {engine} with {card.name}"
        try:
            answer = await ask_child([*self._command, engine, str(directory), self._options], MEASURE_S, what)
            if isinstance(share := answer.get("disturbed"), float):
                _log.info("%s: put off, because other programs use %.0f %% of the cores", what, 100 * share)
                return None
            speed = msgspec.convert(answer.get("speed"), EngineSpeed)
            if not speed.is_valid:
                raise EngineError(f"{what}: impossible figures")
        except (EngineError, msgspec.ValidationError) as exc:
            _log.info("%s failed: %s", what, exc)
            return _Measurement(card.name, card.digest, engine, card.num_layers, setup, None, str(exc)[:300])
        tokens_per_s = 1 / speed.one.of(card.num_layers, is_last=True)
        _log.info("measured %s with %s: %.1f tokens/s on this machine alone", engine, card.name, tokens_per_s)
        return _Measurement(card.name, card.digest, engine, card.num_layers, setup, speed)

    def _engines(self, card: ModelCard, needs: SpeedNeeds) -> list[str]:
        """The engines to measure; engines that compute nothing useful have a negative preference."""
        providers = self._registry.providers
        engines = needs.engines_for(card.name, card.architecture)
        return [engine for engine in engines if providers[engine].availability().preference >= 0]

    def _setup(self, engine: str, needs: SpeedNeeds) -> str:
        """A digest of what the speed of an engine depends on besides the model: its build and options, the machine."""
        provider, device = self._registry.providers[engine], needs.device()
        machine = "" if device is None else f"{device.kind} {device.name} {device.cores}"
        facts = [VERSION, provider.version(), provider.availability().compute, self._options, machine]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def _read_all(self, needs: SpeedNeeds) -> None:
        """Reads the kept measurements of this setup, the oldest first. Blocking."""
        with contextlib.suppress(OSError):
            files = sorted(self._cache_dir.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
            for file in files[-MAX_KEPT:]:
                with contextlib.suppress(msgspec.DecodeError):
                    kept = msgspec.json.decode(file.read_bytes(), type=_Measurement)
                    is_here = kept.engine in self._registry.providers and kept.setup == self._setup(kept.engine, needs)
                    if is_here and kept.speed is not None and kept.speed.is_valid and kept.num_layers > 0:
                        self._found.setdefault(kept.digest, {})[kept.engine] = kept
                        self._digests[kept.model] = kept.digest

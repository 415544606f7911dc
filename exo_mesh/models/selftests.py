"""Computes a few layers with an engine of this machine in a child process, for this node or for a peer."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from exo_mesh.engine.registry import Registry
from exo_mesh.errors import EngineError, InputError, ModelError, error_from_code
from exo_mesh.machine.disk import Disk
from exo_mesh.models.calls import SELF_TEST_S
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.engine_child import ask_child
from exo_mesh.models.self_tested import SelfTested

SELF_TEST_COMMAND: tuple[str, ...] = (sys.executable, "-m", "exo_mesh.rings.runner.asking.selftest", "--tied")

MAX_RANGES = 8
"""Most ranges: the first, the last, and one per further layer kind; no known architecture has more than five."""

MAX_WAITING = 4
"""Most requests that may wait here for a self-test; more are refused."""


Bring = Callable[[str, str, Sequence[tuple[int, int]]], Awaitable[None]]


async def _bring_nothing(model: str, digest: str, ranges: Sequence[tuple[int, int]]) -> None:
    pass


class SelfTests:
    """Runs one self-test at a time, because it loads layers for which no memory is reserved."""

    def __init__(
        self,
        registry: Registry,
        catalogue: Catalogue,
        options: Mapping[str, str],
        scratch: Path,
        command: Sequence[str] = SELF_TEST_COMMAND,
        disk: Disk | None = None,
        bring: Bring = _bring_nothing,
    ) -> None:
        """bring: fetches missing parts of a model to this machine, by name and digest: its headers, and these layer
        ranges."""
        self._bring = bring
        self._disk = disk or Disk(scratch)
        self._registry = registry
        self._catalogue = catalogue
        self._options = options
        self._scratch = scratch
        self._command = command
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def run(self, model: str, digest: str, engine: str, ranges: Sequence[tuple[int, int]]) -> SelfTested:
        """Runs a self-test. Raises InputError for a request out of bounds, UnknownModelError or ModelError if the model
        is not here or has another digest, EngineError if the engine cannot run here or fails."""
        await self._bring(model, digest, ())
        card = await asyncio.to_thread(self._catalogue.local_card, model)
        if card.digest != digest:
            raise ModelError(
                f"the files of {model} here have digest {card.digest[:12]}, not the requested {digest[:12]}"
            )
        if not 0 < len(ranges) <= MAX_RANGES or any(not 0 <= a < b <= card.num_layers for a, b in ranges):
            given = [list(one) for one in ranges[:9]]
            raise InputError(f"a self-test needs 1 to {MAX_RANGES} layer ranges of {card.name}, not {given}")
        provider = self._registry.providers.get(engine)
        if provider is None or not provider.availability().available:
            raise EngineError(f"engine {engine} cannot run here")
        if self._waiting >= MAX_WAITING:
            raise EngineError(f"{self._waiting} self-tests wait here already; try again later")
        # the child writes these layers in float32, usually twice their size on disk
        need = 2 * sum(card.shard_bytes(start, stop) for start, stop in ranges)
        if not await asyncio.to_thread(self._disk.has_room, need):
            raise EngineError(f"a self-test of {card.name} writes up to {need / 1e9:.1f} GB; the disk is too full")
        model_dir = await asyncio.to_thread(self._catalogue.local_dir, model)
        self._waiting += 1
        try:
            await self._bring(model, digest, ranges)
            async with self._turn:
                return await self._ask_child(engine, model_dir, ranges)
        finally:
            self._waiting -= 1

    async def _ask_child(self, engine: str, model_dir: Path, ranges: Sequence[tuple[int, int]]) -> SelfTested:
        try:
            await asyncio.to_thread(self._scratch.mkdir, parents=True, exist_ok=True)
        except OSError as exc:
            self._disk.failed(exc, "a self-test")
            raise EngineError(f"a self-test cannot write below {self._scratch}: {exc.strerror or exc}") from exc
        wanted = ",".join(f"{start}:{stop}" for start, stop in ranges)
        command = [*self._command, engine, str(model_dir), str(self._scratch), wanted, json.dumps(dict(self._options))]
        what = f"the self-test of {engine} with {model_dir.name} failed"
        answer = await ask_child(command, SELF_TEST_S, what)
        if "error" in answer:
            raise error_from_code(str(answer.get("code")), f"{what}: {answer['error']}")
        try:
            return msgspec.convert(answer, SelfTested)
        except msgspec.ValidationError as exc:
            raise EngineError(f"{what}: its answer cannot be read: {exc}") from exc

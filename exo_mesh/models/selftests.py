"""Computes a few layers with an engine of this machine in a child process, for this node or for a peer."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from exo_mesh.engine.registry import Registry
from exo_mesh.errors import EngineError, InputError, ModelError, error_from_code
from exo_mesh.machine.disk import Disk
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.engine_child import ask_child
from exo_mesh.wire.control_client import SELF_TEST_S
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto import plan_pb2

SELF_TEST_COMMAND: tuple[str, ...] = (sys.executable, "-m", "exo_mesh.rings.runner.selftest", "--tied")

MAX_RANGES = 8
"""Most ranges: the first, the last, and one per further layer kind; no known architecture has more than five."""

MAX_WAITING = 4
"""Most requests that may wait here for a self-test; more are refused."""


class _Result(msgspec.Struct, frozen=True):
    """One range as the child process prints it; values are float32 in base64."""

    range: tuple[int, int]
    outputs: dict[str, str]
    inputs: list[tuple[str, str, tuple[int, ...]]]
    given: list[tuple[str, str, tuple[int, ...]]]


class _Answer(msgspec.Struct, frozen=True):
    version: str
    native_dtype: str
    results: list[_Result]


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

    async def run(self, request: pb.SelfTestRequest) -> pb.SelfTestReply:
        """Runs a self-test. Raises InputError for a request out of bounds, UnknownModelError or ModelError if the model
        is not here or has another digest, EngineError if the engine cannot run here or fails."""
        ranges = [(item.start, item.stop) for item in request.ranges]
        await self._bring(request.model, request.model_digest, ())
        card = await asyncio.to_thread(self._catalogue.local_card, request.model)
        if card.digest != request.model_digest:
            raise ModelError(
                f"the files of {request.model} here have digest {card.digest[:12]}, "
                f"not the requested {request.model_digest[:12]}"
            )
        if not 0 < len(ranges) <= MAX_RANGES or any(not 0 <= a < b <= card.num_layers for a, b in ranges):
            given = [list(one) for one in ranges[:9]]
            raise InputError(f"a self-test needs 1 to {MAX_RANGES} layer ranges of {card.name}, not {given}")
        provider = self._registry.providers.get(request.engine)
        if provider is None or not provider.availability().available:
            raise EngineError(f"engine {request.engine} cannot run here")
        if self._waiting >= MAX_WAITING:
            raise EngineError(f"{self._waiting} self-tests wait here already; try again later")
        # the child writes these layers in float32, usually twice their size on disk
        need = 2 * sum(card.shard_bytes(start, stop) for start, stop in ranges)
        if not await asyncio.to_thread(self._disk.has_room, need):
            raise EngineError(f"a self-test of {card.name} writes up to {need / 1e9:.1f} GB; the disk is too full")
        model_dir = await asyncio.to_thread(self._catalogue.local_dir, request.model)
        self._waiting += 1
        try:
            await self._bring(request.model, request.model_digest, ranges)
            async with self._turn:
                return await self._ask_child(request.engine, model_dir, ranges)
        finally:
            self._waiting -= 1

    async def _ask_child(self, engine: str, model_dir: Path, ranges: Sequence[tuple[int, int]]) -> pb.SelfTestReply:
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
        return _reply(answer, what)


def _reply(answer: Mapping[str, Any], what: str) -> pb.SelfTestReply:
    try:
        found = msgspec.convert(answer, _Answer)
        results = [
            pb.RangeResult(
                range=pb.LayerRange(start=result.range[0], stop=result.range[1]),
                outputs=[
                    pb.NamedValues(name=name, values=base64.b64decode(text)) for name, text in result.outputs.items()
                ],
                inputs=[_spec(*spec) for spec in result.inputs],
                given=[_spec(*spec) for spec in result.given],
            )
            for result in found.results
        ]
    except (msgspec.ValidationError, ValueError) as exc:
        raise EngineError(f"{what}: its answer cannot be read: {exc}") from exc
    return pb.SelfTestReply(version=found.version, native_dtype=found.native_dtype, results=results)


def _spec(name: str, dtype: str, item_shape: Sequence[int]) -> plan_pb2.TensorSpec:
    return plan_pb2.TensorSpec(name=name, dtype=dtype, item_shape=item_shape)

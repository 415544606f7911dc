"""Where a model may be cut for an engine: asked of the engine in a short-lived child process, and kept on disk."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from exo_mesh.domain.model import ModelCard
from exo_mesh.engine.contract import CutTracer
from exo_mesh.engine.registry import Registry
from exo_mesh.errors import EngineError, MeshError, UnknownModelError
from exo_mesh.membership.service import Membership
from exo_mesh.node.catalogue import Catalogue, card_from_json
from exo_mesh.transport.control_client import CUTS_S
from exo_mesh.weights.store import SHIPPED

CUTS_COMMAND: tuple[str, ...] = (sys.executable, "-m", "exo_mesh.runner.cuts")

_log = logging.getLogger(__name__)


class LegalCuts:
    """Answers for this machine and, by asking a peer, for models and engines that only others have."""

    def __init__(
        self,
        registry: Registry,
        catalogue: Catalogue,
        membership: Membership,
        cache_dir: Path,
        command: Sequence[str] = CUTS_COMMAND,
    ) -> None:
        self._registry = registry
        self._catalogue = catalogue
        self._membership = membership
        self._cache_dir = cache_dir
        self._command = command
        self._known: dict[tuple[str, str], tuple[int, ...]] = {}
        self._turn = asyncio.Lock()

    async def of(self, card: ModelCard, engine: str) -> tuple[int, ...]:
        """Layers at which a stage may begin. What cannot be found out counts as legal: loading checks it again."""
        key = (card.digest, engine)
        if key not in self._known:
            try:
                self._known[key] = await self._find(card, engine)
            except MeshError as exc:
                _log.warning("where %s may be cut for %s is unknown: %s", card.name, engine, exc)
                return card.legal_cuts
        return self._known[key]

    async def here(self, card: ModelCard, engine: str) -> tuple[int, ...]:
        """As this machine's engine says. Raises UnknownModelError without its files, EngineError without an answer."""
        provider = self._registry.providers.get(engine)
        if provider is None or not provider.availability().available:
            raise EngineError(f"engine {engine} cannot run here")
        if not isinstance(provider, CutTracer) or card.name == SHIPPED:
            return card.legal_cuts  # the shipped model can be cut anywhere: a test asks each engine
        model_dir = await asyncio.to_thread(self._catalogue.local_dir, card.name)
        version = re.sub(r"[^A-Za-z0-9.]+", "-", f"{engine}-{provider.version()}")[:64]
        kept = self._cache_dir / f"{card.digest[:32]}-{version}.json"
        async with self._turn:  # one child at a time, and the second to ask finds the first one's answer
            cuts = await asyncio.to_thread(_read, kept)
            if cuts is None:
                cuts = await self._ask_child(engine, model_dir)
                if cuts:  # "in one piece only" may also be a file that is not complete yet
                    await asyncio.to_thread(_write, kept, cuts)
        return cuts

    async def _find(self, card: ModelCard, engine: str) -> tuple[int, ...]:
        try:
            return await self.here(card, engine)
        except (UnknownModelError, EngineError) as exc:
            failure: MeshError = exc
        for peer in self._membership.peers:
            if card.name in peer.info.models and engine in peer.info.engines:
                try:
                    reply = await peer.client.describe_model(card.name, engine)
                    return card_from_json(reply.card_json).legal_cuts
                except MeshError as exc:
                    failure = exc
        raise failure

    async def _ask_child(self, engine: str, model_dir: Path) -> tuple[int, ...]:
        child = await asyncio.create_subprocess_exec(
            *self._command,
            engine,
            str(model_dir),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(CUTS_S):
                output, noise = await child.communicate()
        except TimeoutError as exc:
            raise EngineError(f"{engine} did not say within {CUTS_S:.0f} s where {model_dir} may be cut") from exc
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        answer = _last_object(output)
        cuts = answer.get("cuts")
        if not isinstance(cuts, list):
            last_words = noise.decode(errors="replace").strip().rpartition("\n")[2][:300]
            raise EngineError(f"{engine} cannot say where to cut {model_dir}: {answer.get('error') or last_words}")
        if reason := answer.get("reason"):
            _log.info("%s runs in one piece only: %s", model_dir, reason)
        return tuple(int(cut) for cut in cuts)


def _last_object(output: bytes) -> Mapping[str, object]:
    """The JSON object in the last line; the engine's library may have written anything before."""
    lines = output.decode(errors="replace").strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _read(file: Path) -> tuple[int, ...] | None:
    try:
        return tuple(int(cut) for cut in json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _write(file: Path, cuts: tuple[int, ...]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(".new")
        scratch.write_text(json.dumps(cuts))
        scratch.replace(file)
    except OSError as exc:
        _log.warning("%s cannot be kept: %s", file, exc.strerror or exc)

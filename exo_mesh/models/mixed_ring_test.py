"""Tests whether engines may share a ring of a model, by running them, once per model and pair of builds."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import msgspec

from exo_mesh.domain.agreement import (
    AgreementVerdict,
    Report,
    common_dtype,
    compare,
    ranges_to_test,
)
from exo_mesh.domain.device import DTYPE_TAGS
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.ring_candidates import Candidate
from exo_mesh.engine.contract import ModelSurvey
from exo_mesh.errors import MeshError
from exo_mesh.machine.disk import Disk
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.calls import self_test
from exo_mesh.models.selftests import MAX_RANGES
from exo_mesh.models.surveys import Surveys, forget_oldest, write_kept

MAX_KEPT = 512
"""Most verdicts on disk and in memory; the oldest are deleted first."""

FAILURE_S = 60.0
"""How long a failed self-test prevents mixing before it is repeated: its peer may have been busy."""

_log = logging.getLogger(__name__)


class Tried(msgspec.Struct, frozen=True):
    """A verdict on two builds, and the dtype of the activations that each passes on in a ring of its own."""

    verdict: AgreementVerdict
    native: dict[str, str]


class MixingOutcome(msgspec.Struct, frozen=True):
    """The result for a ring. unmixable: why pairs of builds must not share it; if empty, they use activation_dtype."""

    unmixable: Mapping[frozenset[str], str] = msgspec.field(default_factory=dict)
    activation_dtype: str = ""


class MixedRingTest:
    """Asks one peer of each build to compute the same few layers, and compares the results."""

    def __init__(
        self,
        membership: Membership,
        surveys: Surveys,
        cache_dir: Path,
        disk: Disk | None = None,
    ) -> None:
        self._disk = disk or Disk(cache_dir)
        self._membership = membership
        self._surveys = surveys
        self._cache_dir = cache_dir
        self._known: dict[str, Tried] = {}
        self._failed: dict[str, tuple[str, float]] = {}
        self._turn = asyncio.Lock()

    async def of(self, card: ModelCard, ring: Sequence[Candidate]) -> MixingOutcome:
        """Decides whether these peers may share a ring with these engines, and in which dtype. Raises no MeshError."""
        by_build = {candidate.build: candidate for candidate in reversed(ring)}
        refused: dict[frozenset[str], str] = {}
        native: dict[str, str] = {}
        for one, other in combinations(sorted(by_build), 2):
            if by_build[one].engine == by_build[other].engine:
                continue
            tried = await self._tried(card, by_build[one], by_build[other])
            if isinstance(tried, str) or tried.verdict.reason:
                refused[frozenset((one, other))] = tried if isinstance(tried, str) else tried.verdict.reason
            else:
                native |= tried.native
        if refused:
            return MixingOutcome(refused)
        dtype = common_dtype(native.values(), [self._accepted(candidate) for candidate in ring])
        if not dtype:
            pair = frozenset(list(by_build)[:2])
            return MixingOutcome({pair: f"{' and '.join(sorted(by_build))} have no dtype of activations in common"})
        return MixingOutcome({}, dtype)

    def _accepted(self, candidate: Candidate) -> tuple[str, ...]:
        own = self._membership.own
        peer = self._membership.peer(candidate.peer_id)
        info = own if candidate.peer_id == own.id else peer.info if peer is not None else None
        found = info.engine_info(candidate.engine) if info is not None else None
        return found.dtypes if found is not None else tuple(DTYPE_TAGS)

    async def _tried(self, card: ModelCard, one: Candidate, other: Candidate) -> Tried | str:
        """Returns the verdict on two builds, tested now if it is unknown; or the reason why it cannot be tested."""
        for candidate in (one, other):
            if not self._accepted(candidate):
                return f"{candidate.build} accepts no activations from another engine"
        key = _key(card, one.build, other.build)
        if key in self._known:
            return self._known[key]
        async with self._turn:
            if key in self._known:  # the first caller may have found the answer meanwhile
                return self._known[key]
            kept = self._cache_dir / f"{key}.json"
            tried = await asyncio.to_thread(_read, kept)
            now = asyncio.get_running_loop().time()
            if tried is None:
                failure, until = self._failed.get(key, ("", 0.0))
                if now < until:
                    return failure
                try:
                    tried = await self._try(card, one, other)
                except MeshError as exc:
                    failure = f"{one.build} and {other.build} could not be compared: {exc}"
                    self._failed[key] = (failure, now + FAILURE_S)
                    forget_oldest(self._failed, MAX_KEPT)
                    _log.warning("%s: %s", card.name, failure)
                    return failure
                text = json.dumps(msgspec.to_builtins(tried))
                await asyncio.to_thread(write_kept, self._disk, kept, text, "verdicts on engines", MAX_KEPT)
            self._known[key] = tried
            forget_oldest(self._known, MAX_KEPT)
            return tried

    async def _try(self, card: ModelCard, one: Candidate, other: Candidate) -> Tried:
        surveys = [await self._surveys.of(card, candidate.engine) for candidate in (one, other)]
        cuts = set(surveys[0].legal_cuts) & set(surveys[1].legal_cuts)
        ranges = ranges_to_test(card.num_layers, cuts, [survey.layer_kinds for survey in surveys], MAX_RANGES)
        asked = (self._report(card, one, ranges), self._report(card, other, ranges))
        answers = await asyncio.gather(*asked, return_exceptions=True)  # waits until both have ended
        reports = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            reports.append(answer)
        verdict = compare(reports[0], reports[1], _kinds(surveys, ranges))
        _log.info("%s: %s and %s differ by %.1e", card.name, one.build, other.build, verdict.difference)
        return Tried(verdict, {one.build: reports[0].native_dtype, other.build: reports[1].native_dtype})

    async def _report(self, card: ModelCard, candidate: Candidate, ranges: Sequence[tuple[int, int]]) -> Report:
        calls = self._membership.calls
        return await self_test(calls, candidate.peer_id, card, candidate.engine, ranges, candidate.build)


def _kinds(surveys: Sequence[ModelSurvey], ranges: Sequence[tuple[int, int]]) -> dict[int, str]:
    kinds = next((survey.layer_kinds for survey in surveys if survey.layer_kinds), ())
    return {start: "+".join(dict.fromkeys(kinds[start:stop])) for start, stop in ranges} if kinds else {}


def _key(card: ModelCard, one: str, other: str) -> str:
    builds = hashlib.sha256(json.dumps(sorted((one, other))).encode()).hexdigest()
    return f"{card.digest[:32]}-{builds[:32]}"


def _read(file: Path) -> Tried | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Tried)
    except (OSError, msgspec.DecodeError):
        return None

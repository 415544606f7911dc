"""Checks fetched parts of model files against the digests of the whole files, and says which are not checked yet.

A file that is whole is checked as it is completed, and again once another program has changed it. Of a file that is
fetched in parts, no node has all bytes; a node hashes its own and reads the others' from the peers that have them. In a
closed mesh one member of a ring does that for all. A stage waits for the check as long as its download took.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from exo_mesh.base.tasks import TaskOwner
from exo_mesh.domain.spans import covers, num_bytes
from exo_mesh.errors import FetchError, MeshError, UnknownModelError
from exo_mesh.mesh.membership.peers import Peer
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.downloads.sources import ModelSources
from exo_mesh.models.fetcher.wire import NO_EDGES, Source, Word
from exo_mesh.models.fetching import Fetcher
from exo_mesh.models.local_files import Holding, Layers, LocalFiles

LEAST_WAIT_S = 2.0
"""A stage waits at least this long for the check of its files, however quick the download was."""

FIRST_RETRY_S, LAST_RETRY_S = 10.0, 600.0
"""Time until a check is tried again that found no source for some bytes; it doubles each time."""

REPLACE_S = 60.0
"""Longest wait until the instances on wrong bytes are deleted."""

FIRST_WORD_S, LAST_WORD_S = 0.5, 8.0
"""Pauses between two questions whether another member of the ring has checked a file; they double."""

MARK_S = 3.0
"""How long the mark of a member that checks may take to arrive here."""

WORD_S = 600.0
"""Longest wait for the check of another member; then this node checks by itself."""

_log = logging.getLogger(__name__)

OnWrong = Callable[[str, bool], Coroutine[Any, Any, None]]
"""Called when a file of a model turned out to have wrong bytes: (model, whether stages that load now still wait for the
check)."""


_Verify = Callable[[Sequence[str], Word, Mapping[str, tuple[int, ...]]], Coroutine[Any, Any, tuple[str, ...]]]


class WrongBytesError(FetchError):
    """The files here have wrong bytes, and no source has the right ones."""


class FileChecks:
    """One check per model at a time. tasks: owns them."""

    def __init__(
        self,
        membership: Membership,
        files: LocalFiles,
        fetcher: Fetcher,
        sources: ModelSources,
        tasks: TaskOwner,
        on_wrong: OnWrong,
    ) -> None:
        self._membership = membership
        self._files = files
        self._fetcher = fetcher
        self._sources = sources
        self._tasks = tasks
        self._on_wrong = on_wrong
        self._running: dict[str, asyncio.Task[None]] = {}
        self._layers: dict[str, set[Layers]] = {}
        self._waiting: Counter[str] = Counter()
        self._wrong: set[str] = set()
        """Models with wrong bytes that were not replaced yet."""

    async def check(self, model: str, layers: Layers, wait_s: float) -> None:
        """Starts a check of these layers of a model, unless they are checked, and waits for it at most wait_s; as soon
        as wrong bytes are known, until they are replaced. Raises WrongBytesError if they are not."""
        files = await asyncio.to_thread(self._files.unverified, model, layers)
        if not files:
            return
        self._note(model, is_unverified=True)
        self._layers.setdefault(model, set()).add(layers)
        task = self._running.get(model)
        if task is None:
            task = self._running[model] = self._tasks.start(self._run(model), f"check the files of {model}")
            task.add_done_callback(lambda _: self._ended(model))
        if not any(files.values()):
            return  # without a digest, a check needs more sources than there usually are
        self._waiting[model] += 1
        try:
            if model not in self._wrong:
                await asyncio.wait((task,), timeout=max(LEAST_WAIT_S, wait_s))
            if model in self._wrong:
                await asyncio.wait((task,), timeout=LAST_RETRY_S)
        finally:
            self._waiting[model] -= 1
            self._waiting += Counter()  # drops zero counts
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error
        if model in self._wrong:
            raise WrongBytesError(f"wrong bytes of {model} are here, and were not replaced within {LAST_RETRY_S:g} s")

    def _ended(self, model: str) -> None:
        del self._running[model], self._layers[model]

    async def _run(self, model: str) -> None:
        """Checks a model until nothing of it is unknown or it is gone. Raises FetchError if no source has right
        bytes."""
        pause_s, uses_hub = FIRST_RETRY_S, False
        while True:
            await self._await_fetches(model)
            fetching = self._sources.is_fetching_elsewhere(model)
            try:
                if not await self._check_once(model, uses_hub=uses_hub):
                    self._settle(model)
                    return
                if model in self._wrong:
                    raise WrongBytesError(f"wrong bytes of {model} are here, and no source has the rest of its files")
            except WrongBytesError as exc:
                _log.error("the files of %s: %s", model, exc)
                raise  # the next stage that needs them tries again
            except UnknownModelError:
                self._settle(model)
                return
            except (MeshError, OSError) as exc:
                _log.info("the files of %s cannot be checked now: %s", model, exc)
            await self._await_news(model, fetching, pause_s)
            pause_s, uses_hub = min(2 * pause_s, LAST_RETRY_S), True

    def _settle(self, model: str) -> None:
        """Notes that nothing of a model is unchecked any more."""
        self._wrong.discard(model)
        self._note(model, is_unverified=False)

    async def _await_fetches(self, model: str) -> None:
        """Waits until no other peer fetches the model: then the missing bytes are there. At most LAST_RETRY_S, because
        a stranger may claim to fetch for ever."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_RETRY_S):
                while any(self._sources.is_fetching_elsewhere(model).values()):
                    await self._membership.changed.wait(LAST_RETRY_S)

    async def _await_news(self, model: str, before: dict[str, bool], pause_s: float) -> None:
        """Waits until the downloads of the model at other peers have changed, or for pause_s."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                while self._sources.is_fetching_elsewhere(model) == before:
                    await self._membership.changed.wait(pause_s)

    async def _check_once(self, model: str, *, uses_hub: bool) -> tuple[str, ...]:
        """Returns the files that are still unknown. uses_hub: not at the first time, because peers may just begin to
        fetch what is missing. Raises MeshError and OSError."""
        found = [await asyncio.to_thread(self._files.unverified, model, one) for one in tuple(self._layers[model])]
        files = sorted({file for one in found for file in one})
        own = await asyncio.to_thread(self._files.holding, model)
        members = self._members(model)
        others = [(peer, one) for peer, one in await self._sources.holdings(model) if one.digest == own.digest]
        others.sort(key=lambda other: other[0].id not in members)
        used = [*(self._sources.source(peer) for peer, _ in others), *self._sources.hub(own)]
        is_whole = all(covers(own.present.get(file, ()), ((0, own.files[file].size),)) for file in files)
        if not files or not (used or is_whole):  # a whole file needs no source, unless it is wrong
            return tuple(files)
        verify = await self._verifier(model, used, uses_hub=uses_hub)
        if not self._sources.trusts_peers:
            return await verify(files, "", NO_EDGES)
        edges = {file: tuple(edge for _, one in others for edge in _edges(one, file)) for file in files}
        checkers = {file: self._checker(file, own, others, members) for file in files}
        unknown = await verify([file for file, checker in checkers.items() if checker is None], "first", edges)
        theirs = {file: checker for file, checker in checkers.items() if checker is not None}
        left = await self._await_word(model, theirs, verify)
        return (*unknown, *(await verify(left, "first", edges)))

    def _checker(
        self, file: str, own: Holding, others: Sequence[tuple[Peer, Holding]], members: Collection[str]
    ) -> Peer | None:
        """The member of the ring that checks a file for all: that with most of its bytes, which reads the least of
        others. None: this node."""
        sizes = [(num_bytes(one.present.get(file, ())), peer) for peer, one in others if peer.id in members]
        held = [(-size, peer.id, peer) for size, peer in sizes if 0 < size < own.files[file].size]
        best = min(held, key=lambda one: one[:2], default=None)
        mine = (-num_bytes(own.present.get(file, ())), self._membership.own.id)
        return None if best is None or mine < best[:2] else best[2]

    async def _await_word(self, model: str, checkers: Mapping[str, Peer], verify: _Verify) -> list[str]:
        """Compares files with what the members that check them have found. Returns the files that nobody checks."""
        clock = asyncio.get_running_loop().time
        began, pause_s, left = clock(), FIRST_WORD_S, list(checkers)
        while left:
            is_early = clock() < began + MARK_S
            left = list(await verify(left, "only", NO_EDGES))
            alive = {peer.id: model in peer.info.unverified for peer in self._membership.peers}
            is_checking = any(alive.get(checkers[file].id, False) or is_early for file in left)
            if not is_checking or clock() > began + WORD_S:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_WORD_S)
        return left

    async def _verifier(self, model: str, used: Sequence[Source], *, uses_hub: bool) -> _Verify:
        """Returns a function that verifies files with the help of these sources. If it finds wrong bytes, it has the
        instances on them replaced, and returns after that."""
        model_dir = await asyncio.to_thread(self._files.model_dir, model)
        replacing: list[asyncio.Task[None]] = []

        def on_wrong(file: str) -> None:
            _log.error("%s of %s does not match its digest: its wrong bytes are looked for and replaced", file, model)
            self._wrong.add(model)
            if not replacing:
                call = self._on_wrong(model, bool(self._waiting[model]))
                replacing.append(self._tasks.start(call, f"replace the instances of {model}"))

        async def verify(files: Sequence[str], word: Word, edges: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
            if not files:
                return ()
            try:
                return await self._fetcher.verify(
                    model_dir, files, used, on_wrong, uses_hub=uses_hub, word=word, edges=edges
                )
            except FetchError as exc:
                if replacing:
                    raise WrongBytesError(str(exc), remedy=exc.remedy, is_final=exc.is_final) from exc
                raise
            finally:
                if replacing:  # the model stays marked until nothing computes with the wrong bytes any more
                    await asyncio.wait(replacing, timeout=REPLACE_S)

        return verify

    def _members(self, model: str) -> set[str]:
        """The peers with stages of the model. Their bytes are compared first: a stranger who holds other bytes must not
        make a ring look wrong."""
        records = self._membership.view.records_of_instances()
        return {peer for _, one in records if one.plan.model == model for peer in one.plan.member_ids}

    def _note(self, model: str, *, is_unverified: bool) -> None:
        """Publishes whether some files of a model are not checked."""
        before = self._membership.own.unverified
        now = tuple(sorted({*before, model} if is_unverified else {*before} - {model}))
        if now != before:
            self._membership.describe(replace(self._membership.own, unverified=now))


def _edges(holding: Holding, file: str) -> Iterator[int]:
    """Where the parts of a file that a machine has begin and end."""
    for span in holding.present.get(file, ()):
        yield from span

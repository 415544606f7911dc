"""The node's side of its fetcher: a child process that starts at the first download.

The child ends after 5 idle minutes. If it crashes, a new child gets its unfinished requests once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from exo_mesh.base.tasks import TaskOwner
from exo_mesh.errors import FetchError, MeshError, UnknownModelError, error_from_code
from exo_mesh.models.fetcher.wire import (
    MAX_LINE_BYTES,
    NO_EDGES,
    Answer,
    CancelFetch,
    Fetch,
    Fetched,
    FetchFailed,
    FetchPace,
    FetchProgress,
    HubModel,
    Request,
    Resolve,
    Resolved,
    Search,
    SearchResult,
    Setup,
    Share,
    Source,
    Tls,
    Verified,
    Verify,
    Word,
    WrongBytes,
)
from exo_mesh.settings.config import SECRET_VARIABLE

HUB_SOURCE = Source()

IDLE_LIMIT_S = 300.0
CLOSE_LIMIT_S = 1.0
"""How long a child may take to end after its input was closed; then it is killed."""

CANCEL_LIMIT_S = 1.0
"""How long a cancelled call waits until the child has stopped its work; a read from a silent source takes longer."""

RESOLVE_LIMIT_S = 600.0
"""For config, tokenizer and headers: up to 150 MB, on a link of maybe 2 Mbit/s, while a client waits."""

SEARCH_LIMIT_S = 60.0

MAX_STARTS = 2
"""Attempts per request: a second child gets the request if the first one crashes."""

NICE = 5
_LAST_WORDS = 5

OnBytes = Callable[[int, int, Mapping[str, int]], None]
"""(bytes present, bytes requested, bytes received by peer id, "" for the hub); called at most twice a second."""

_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
_log = logging.getLogger(__name__)


class _Asked(msgspec.Struct, eq=False):
    """A running request. starts: number of children that it was sent to."""

    request: Resolve | Fetch | Verify | Search
    answer: asyncio.Future[Answer]
    on_progress: OnBytes | None = None
    starts: int = 0
    on_wrong: Callable[[str], None] | None = None


class _Child(msgspec.Struct, eq=False):
    process: asyncio.subprocess.Process
    last_words: deque[str] = msgspec.field(default_factory=lambda: deque(maxlen=_LAST_WORDS))

    def send(self, request: Request) -> None:
        """Sends a request. If the child has ended, `_listen` notices."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):
            self.process.stdin.write(msgspec.json.encode(request) + b"\n")

    async def end(self) -> None:
        """Ends the child by closing its input, or by force if it does not end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


class Fetcher:
    """Fetches for this node; all methods may be called concurrently."""

    def __init__(
        self,
        tasks: TaskOwner,
        *,
        is_offline: bool = False,
        floor_bytes: int = 0,
        tls: Tls | None = None,
        environ: Mapping[str, str] = os.environ,
        idle_limit_s: float = IDLE_LIMIT_S,
    ) -> None:
        """floor_bytes: to leave free on the disk. tls: credentials for peers. No process starts before it is needed."""
        self._tasks = tasks
        self._is_offline = is_offline
        self._setup = Setup(tls, floor_bytes)
        self._pace = FetchPace(is_busy=False)
        self._environ = environ
        self._idle_limit_s = idle_limit_s
        self._ids = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._child: _Child | None = None
        self._starting = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the child, None without a child."""
        return self._child.process.pid if self._child is not None else None

    def renew(self, tls: Tls | None) -> None:
        """Uses other credentials for the connections that are opened from now on."""
        self._setup = Setup(tls, self._setup.floor_bytes, self._setup.hub_token)
        self._send(self._setup)

    def authorize(self, hub_token: str) -> None:
        """Uses another token for the hub from now on; "" for none."""
        self._setup = Setup(self._setup.tls, self._setup.floor_bytes, hub_token)
        self._send(self._setup)

    def pace(self, *, is_busy: bool) -> None:
        """Limits the fetcher's share of the machine while streams run on it."""
        if is_busy != self._pace.is_busy:
            self._pace = FetchPace(is_busy)
            self._send(self._pace)

    async def resolve(
        self,
        name: str,
        model_dir: Path,
        *,
        repo: str = "",
        revision: str = "main",
        sources: Sequence[Source] = (HUB_SOURCE,),
        trust_remote_code: bool = False,
    ) -> dict[str, int]:
        """Creates a directory with config, tokenizer, headers and manifest of a model; returns the bytes by source.

        Does nothing if the directory exists. Raises FetchError, UnknownModelError, and ModelError if the model cannot
        be used.
        """
        allowed = self._allowed(name, tuple(sources))
        resolve = Resolve(next(self._ids), name, repo, revision, str(model_dir), allowed, trust_remote_code)
        answer = await self._ask_within(RESOLVE_LIMIT_S, resolve, f"looking up {name}")
        return answer.num_bytes if isinstance(answer, Resolved) else {}

    async def fetch(
        self, model_dir: Path, shares: Sequence[Share], on_progress: OnBytes | None = None
    ) -> dict[str, int]:
        """Fetches bytes into a directory that `resolve` created; returns the bytes by source. Cancelling keeps them.

        Raises FetchError.
        """
        allowed = tuple(Share(share.pieces, self._allowed(model_dir.name, share.sources)) for share in shares)
        fetch = Fetch(next(self._ids), str(model_dir), allowed)
        answer = await self._ask(_Asked(fetch, asyncio.get_running_loop().create_future(), on_progress))
        return answer.num_bytes if isinstance(answer, Fetched) else {}

    async def verify(
        self,
        model_dir: Path,
        files: Sequence[str],
        sources: Sequence[Source],
        on_wrong: Callable[[str], None],
        *,
        uses_hub: bool,
        word: Word = "",
        edges: Mapping[str, tuple[int, ...]] = NO_EDGES,
    ) -> tuple[str, ...]:
        """Compares the files that are here only in part with the digests of the whole files; returns the files that
        could not be checked. on_wrong: called with the name of a file with wrong bytes, before they are replaced.
        uses_hub, word, edges: see Verify.

        Raises FetchError, also if no source has the right bytes.
        """
        allowed = self._allowed(model_dir.name, tuple(sources))
        verify = Verify(next(self._ids), str(model_dir), tuple(files), allowed, uses_hub, word, dict(edges))
        asked = _Asked(verify, asyncio.get_running_loop().create_future(), on_wrong=on_wrong)
        answer = await self._ask(asked)
        return answer.unknown if isinstance(answer, Verified) else ()

    async def search(self, query: str, limit: int) -> tuple[HubModel, ...]:
        """Searches models on the hub. Raises FetchError."""
        self._allowed("the hub", (HUB_SOURCE,))
        search = Search(next(self._ids), query, limit)
        answer = await self._ask_within(SEARCH_LIMIT_S, search, "the search")
        return answer.models if isinstance(answer, SearchResult) else ()

    async def close(self) -> None:
        """Ends the child, and every call that waits for it."""
        self._is_closed = True
        self._not_idle()
        async with self._starting:
            child, self._child = self._child, None
        for asked in self._asked.values():
            _fail(asked, FetchError("this node stops; the fetched files are kept"))
        if child is not None:
            await child.end()

    def _allowed(self, what: str, sources: tuple[Source, ...]) -> tuple[Source, ...]:
        """Returns the sources that this node may use. Raises FetchError if none is left."""
        allowed = tuple(source for source in sources if source.peer) if self._is_offline else sources
        if not allowed:
            offline = self._is_offline and sources
            raise FetchError(
                f"{what} cannot be fetched: "
                + ("this node is offline and fetches from peers only" if offline else "there is no source for it"),
                remedy="start the node without --offline, or connect a peer that has the model" if offline else "",
                is_final=True,
            )
        return allowed

    async def _ask_within(self, limit_s: float, request: Resolve | Search, what: str) -> Answer:
        """Sends a request and waits. Raises FetchError if no answer comes in time, and the error of the answer."""
        try:
            async with asyncio.timeout(limit_s):
                return await self._ask(_Asked(request, asyncio.get_running_loop().create_future()))
        except TimeoutError as exc:
            raise FetchError(
                f"{what} took longer than {limit_s:g} s", remedy="try again, or check the network path to the hub"
            ) from exc

    async def _ask(self, asked: _Asked) -> Answer:
        request = asked.request
        self._asked[request.id] = asked
        self._not_idle()
        try:
            await self._give(asked)
            await asyncio.wait((asked.answer,))  # unlike `await asked.answer`, does not cancel it
            answer = asked.answer.result()
        except asyncio.CancelledError:
            await self._end_cancelled(asked)
            raise
        finally:
            del self._asked[request.id]
            if not self._asked and not self._is_closed:
                self._idle = asyncio.get_running_loop().call_later(self._idle_limit_s, self._end_idle)
        if isinstance(answer, FetchFailed):
            raise _error(answer)
        return answer

    async def _end_cancelled(self, asked: _Asked) -> None:
        """Cancels a request in the child and waits for its last answer, within limits: a fetch that is planned next
        must not be beside this one, whose bytes would come twice."""
        if asked.starts and not asked.answer.done():
            asked.on_progress, asked.starts = None, MAX_STARTS  # after a crash, no other child gets it
            self._send(CancelFetch(asked.request.id))
            await asyncio.wait((asked.answer,), timeout=CANCEL_LIMIT_S)
        if not asked.answer.cancel():
            asked.answer.exception()  # marks an error as seen

    async def _give(self, asked: _Asked) -> None:
        """Sends a request to the child; starts a child if there is none."""
        async with self._starting:
            if self._is_closed:
                raise FetchError("this node stops")
            if self._child is None:
                self._child = await self._start()
            asked.starts += 1
            self._child.send(asked.request)

    async def _start(self) -> _Child:
        environment = {name: value for name, value in self._environ.items() if name != SECRET_VARIABLE}
        environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "MALLOC_ARENA_MAX": "4"}
        environment |= {"HF_HUB_OFFLINE": "1"} if self._is_offline else {}
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "exo_mesh.models.fetcher"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                limit=MAX_LINE_BYTES,
                start_new_session=True,
            )
        except OSError as exc:
            raise FetchError(f"the fetcher process cannot be started: {exc.strerror or exc}") from exc
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        child = _Child(process)
        child.send(self._setup)
        child.send(self._pace)
        self._tasks.start(self._listen(child), "fetcher-answers")
        self._tasks.start(_keep_last_words(child), "fetcher-log")
        return child

    async def _listen(self, child: _Child) -> None:
        """Handles the child's answers until it ends; then handles its unfinished requests."""
        assert child.process.stdout is not None
        try:
            while line := await child.process.stdout.readline():
                self._heard(_answers.decode(line))
        except (ValueError, msgspec.DecodeError, OSError):  # a line that is too long or is not an answer
            _log.warning("the fetcher sent a line that cannot be decoded; restarting it")
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
        await child.process.wait()
        if child is self._child:
            self._child = None
            await self._go_on_without(child)

    def _heard(self, answer: Answer) -> None:
        asked = self._asked.get(answer.id)
        if asked is None:
            return  # cancelled in the meantime
        if isinstance(answer, FetchProgress):
            if asked.on_progress is not None:
                asked.on_progress(answer.done, answer.total, answer.num_bytes)
        elif isinstance(answer, WrongBytes):
            if asked.on_wrong is not None:
                asked.on_wrong(answer.file)
        elif not asked.answer.done():
            asked.answer.set_result(answer)

    async def _go_on_without(self, child: _Child) -> None:
        """Sends the requests of a crashed child to another child, or fails requests that were sent too often."""
        code = child.process.returncode
        if self._asked:
            words = f": {child.last_words[-1][:300]}" if child.last_words else ""
            _log.warning("the fetcher process ended (exit code %s)%s", code, words)
        for asked in [asked for asked in self._asked.values() if not asked.answer.done() and asked.starts]:
            if asked.starts >= MAX_STARTS:
                _fail(asked, FetchError(f"the fetcher process crashed twice (exit code {code})"))
                continue
            try:
                await self._give(asked)
            except FetchError as exc:
                _fail(asked, exc)

    def _send(self, request: Request) -> None:
        if self._child is not None:
            self._child.send(request)

    def _not_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _end_idle(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._tasks.start(child.end(), "fetcher-end")


async def _keep_last_words(child: _Child) -> None:
    assert child.process.stderr is not None
    with contextlib.suppress(ValueError, OSError):
        while line := await child.process.stderr.readline():
            child.last_words.append(line.decode(errors="replace").strip())


def _fail(asked: _Asked, error: FetchError) -> None:
    if not asked.answer.done():
        asked.answer.set_exception(error)


def _error(failed: FetchFailed) -> MeshError:
    if failed.code == FetchError.code:
        return FetchError(failed.message, remedy=failed.remedy, is_final=failed.is_final)
    if failed.code == UnknownModelError.code:
        return UnknownModelError(failed.message, param="model")
    return error_from_code(failed.code, failed.message)

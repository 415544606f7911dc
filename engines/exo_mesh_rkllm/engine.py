"""The RKLLM engine: one model of a RKLLAMA server, one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import aiohttp
import msgspec

from exo_mesh.base.clock import monotonic
from exo_mesh.domain.request import FinishReason
from exo_mesh.domain.whole.text_request import TextEnd, TextEvent, TextRequest
from exo_mesh.engine.contract import LoadProgress
from exo_mesh.engine.whole import WholeLoadRequest
from exo_mesh.errors import EngineError, MeshError, ModelError, OverloadError, StageLostError
from exo_mesh_rkllm.answer import BoardAnswer
from exo_mesh_rkllm.board_lock import BoardLock
from exo_mesh_rkllm.dialects import Dialect, answer_body, answer_path
from exo_mesh_rkllm.exchange import BoardExchange
from exo_mesh_rkllm.look import SLOTS
from exo_mesh_rkllm.options import parse_options
from exo_mesh_rkllm.replies import is_not_loaded, read_chunks
from exo_mesh_rkllm.server import LOAD_S, RkllamaServer, new_session

CHECK_S = 2.0
CLOSE_S = 0.5
FREE_S = 60.0
"""A request waits at most this long for the end of an answer that nobody reads any more, and as long for the answer of
another model of the same board."""

LOCK_POLL_S = 0.02


class _LoadedModel(msgspec.Struct, frozen=True):
    """What `load` found. name: of the model at the server. context_limit: 0 if it is not known."""

    session: aiohttp.ClientSession
    server: RkllamaServer
    dialect: Dialect
    name: str
    context_limit: int
    first_token_s: float
    answer_s: float
    lock: BoardLock


class RkllmEngine:
    """See WholeModelEngine. RKLLAMA cannot continue an answer, so `continues` is False."""

    slots = SLOTS
    continues = False

    def __init__(self, *, free_s: float = FREE_S) -> None:
        self._free_s = free_s
        self._loaded: _LoadedModel | None = None
        self._exchange: BoardExchange | None = None
        self._is_taken = False

    async def load(self, request: WholeLoadRequest, progress: LoadProgress) -> None:
        options, model = parse_options(request.options), request.model
        await self.close()
        session = new_session()
        try:
            server = RkllamaServer(session, model.server)
            dialect, listed = await server.probe()
            if listed is not None and model.served_name not in listed:
                raise ModelError(
                    f"RKLLAMA at {model.server} has no model {model.served_name}; it has {', '.join(listed) or 'none'}"
                )
            await _with_progress(server.load(dialect, model.served_name), progress)
        except BaseException:
            await session.close()
            raise
        self._loaded = _LoadedModel(
            session,
            server,
            dialect,
            model.served_name,
            model.context_limit,
            options.first_token_s,
            options.answer_s,
            BoardLock(model.server),
        )

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        loaded = self._require()
        body = answer_body(loaded.dialect, loaded.name, request)
        if not request.max_tokens:
            yield TextEnd(FinishReason.LENGTH)
            return
        if self._is_taken:
            raise OverloadError("the board computes another request", retry_after_s=1.0)
        self._is_taken = True
        try:
            await self._free_the_board(loaded)
            max_calls = None if request.body.get("parallel_tool_calls", True) else 1
            answer = BoardAnswer(
                request.max_tokens, request.stops, max_calls=max_calls, context_limit=loaded.context_limit
            )
            line = await self._first_line(loaded, answer_path(loaded.dialect, request), body)
            while line is not None and not answer.is_complete:
                for chunk in read_chunks(line):
                    for piece in answer.push(chunk):
                        yield piece
                    if answer.is_complete:
                        break
                else:
                    line = await self._line()
            if not answer.has_end:
                raise StageLostError("RKLLAMA ended the connection in the middle of an answer")
            for piece in answer.flush():
                yield piece
            end = answer.end()
        finally:
            self._is_taken = False
            if self._exchange is not None:
                self._exchange.abandon()
        yield end

    async def check(self) -> None:
        loaded = self._require()
        try:
            async with asyncio.timeout(CHECK_S):
                listed = await loaded.server.models(loaded.dialect)
                if listed is None:
                    await loaded.server.call("GET", "/health")
        except TimeoutError as exc:
            raise EngineError(f"RKLLAMA did not answer within {CHECK_S:g} s") from exc
        except StageLostError as exc:
            raise EngineError(str(exc)) from exc
        if listed is not None and loaded.name not in listed:
            raise EngineError(f"RKLLAMA has no model {loaded.name} any more")

    def memory_bytes(self) -> int:
        """0: the model is in the memory of the server."""
        return 0

    async def close(self) -> None:
        exchange, self._exchange = self._exchange, None
        loaded, self._loaded = self._loaded, None
        if exchange is not None:
            await exchange.close()
        if loaded is not None:
            if exchange is not None and not exchange.was_read:
                # the next engine must not find the rest of this answer: see _free_the_board
                with contextlib.suppress(EngineError, StageLostError, TimeoutError):
                    async with asyncio.timeout(CLOSE_S):
                        await loaded.server.unload(loaded.dialect, loaded.name)
            await loaded.session.close()

    def _require(self) -> _LoadedModel:
        if self._loaded is None:
            raise EngineError("the engine has no model: it was not loaded, or is closed")
        return self._loaded

    async def _free_the_board(self, loaded: _LoadedModel) -> None:
        """Wait until the server has ended the last answer. The unsent rest of that answer would stand at the beginning
        of the next answer: then the model is loaded again, which ends the server's process for it."""
        last = self._exchange
        if last is None:
            return
        if not await last.wait(self._free_s):
            raise OverloadError("the board still computes an answer that was cancelled", retry_after_s=5.0)
        self._exchange = None
        if not last.was_read:
            try:
                await loaded.server.unload(loaded.dialect, loaded.name)
                await loaded.server.load(loaded.dialect, loaded.name)
            except BaseException:
                self._exchange = last  # the next request tries again
                raise

    async def _lock_the_board(self, loaded: _LoadedModel) -> None:
        """Wait until no other model of this board computes an answer."""
        ends_at = monotonic() + self._free_s
        while not loaded.lock.acquire():
            if monotonic() >= ends_at:
                raise OverloadError("the board computes a request for another model", retry_after_s=5.0)
            await asyncio.sleep(LOCK_POLL_S)

    async def _first_line(self, loaded: _LoadedModel, path: str, body: dict[str, Any]) -> bytes | None:
        """Send the request and wait for the first line. An old server that has unloaded the model loads it again."""
        try:
            return await self._send(loaded, path, body)
        except MeshError as exc:
            if not is_not_loaded(exc):
                raise
        await loaded.server.load(loaded.dialect, loaded.name)
        return await self._send(loaded, path, body)

    async def _send(self, loaded: _LoadedModel, path: str, body: dict[str, Any]) -> bytes | None:
        is_whole = loaded.dialect is Dialect.DOCUMENTED
        url = loaded.server.url + path
        await self._lock_the_board(loaded)
        self._exchange = BoardExchange(
            loaded.session, url, body, loaded.answer_s, is_whole=is_whole, when_done=loaded.lock.release
        )
        # a server that gives the whole answer at once gives its first token with the last one
        within_s = loaded.answer_s if is_whole else loaded.first_token_s
        try:
            async with asyncio.timeout(within_s):
                return await self._line()
        except TimeoutError as exc:
            raise EngineError(
                f"RKLLAMA did not begin its answer within {within_s:g} s; long prompts need a higher first_token_s"
            ) from exc

    async def _line(self) -> bytes | None:
        assert self._exchange is not None
        return await self._exchange.line()


async def _with_progress(work: Coroutine[Any, Any, None], progress: LoadProgress) -> None:
    """Run a load and report the seconds that have passed, of LOAD_S; the server does not report its own progress."""
    total, began = int(LOAD_S), monotonic()
    progress(0, total)
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=1.0)
            progress(min(total - 1, int(monotonic() - began)), total)
    finally:
        task.cancel()
        await asyncio.wait([task])
    await task
    progress(total, total)

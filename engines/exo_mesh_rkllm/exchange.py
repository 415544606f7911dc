"""One request to RKLLAMA, which is read to its end even if nobody wants the rest of the answer.

RKLLAMA does not notice that its client has gone. It computes the answer to its end, and what nobody has read stands at
the beginning of the next answer: its worker for a model has one pipe for all answers. So an answer that is no longer
wanted is read and thrown away, and the end of that says that the board is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import aiohttp

from exo_mesh.errors import EngineError, MeshError, StageLostError
from exo_mesh_rkllm.replies import refusal

MAX_LINE_BYTES = 1_048_576
MAX_ERROR_BYTES = 65_536
MAX_LINES = 256
"""Lines that wait for a slow reader; the server waits for the rest."""


class BoardExchange:
    """A request that runs in a task of its own, from its creation on.

    answer_s: deadline of the whole answer. is_whole: the answer is one JSON document and no stream of lines. when_done:
    called when the task ends, however it ends.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        body: dict[str, Any],
        answer_s: float,
        *,
        is_whole: bool = False,
        when_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._session, self._url, self._body, self._answer_s = session, url, body, answer_s
        self._is_whole, self._when_done = is_whole, when_done
        self._lines: asyncio.Queue[bytes | MeshError | None] = asyncio.Queue(MAX_LINES)
        self._is_abandoned = False
        self.was_read = False
        """Whether the server has sent its answer to the end."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="an answer of RKLLAMA")
        self._task.add_done_callback(self._ended)

    @property
    def is_running(self) -> bool:
        return not self._task.done()

    async def line(self) -> bytes | None:
        """The next line; None after the last one. Raises the error that ended the answer: StageLostError if the
        connection was lost."""
        if self._lines.empty() and self._task.done():
            return None
        item = await self._lines.get()
        if isinstance(item, MeshError):
            raise item
        return item

    def abandon(self) -> None:
        """Throw away what comes from now on; the task reads on until the end or the deadline."""
        self._is_abandoned = True
        while not self._lines.empty():
            self._lines.get_nowait()

    async def wait(self, timeout_s: float) -> bool:
        """Wait until the server has ended the answer. Returns whether it has."""
        await asyncio.wait([self._task], timeout=timeout_s)
        return self._task.done()

    async def close(self) -> None:
        """Hang up, and wait until the task has ended."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self._answer_s):
                await self._read()
        except MeshError as exc:
            await self._put(exc)
        except aiohttp.ClientError as exc:  # before TimeoutError: a timeout of connecting is both
            await self._put(connection_lost(exc))
        except TimeoutError:
            await self._put(EngineError(f"RKLLAMA did not end its answer within {self._answer_s:g} s"))
        except OSError as exc:
            await self._put(connection_lost(exc))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._when_done()
        with contextlib.suppress(asyncio.QueueFull):  # a reader that finds lines need not be woken
            self._lines.put_nowait(None)

    async def _read(self) -> None:
        async with self._session.post(self._url, json=self._body, allow_redirects=False) as response:
            if response.status != 200:
                said = await _bounded(response.content, MAX_ERROR_BYTES)
                self.was_read = True
                raise refusal(response.status, _as_json(said))
            if self._is_whole:
                await self._put(await _bounded(response.content, MAX_LINE_BYTES))
            else:
                async for line in split_lines(response.content):
                    await self._put(line)
            self.was_read = True

    async def _put(self, item: bytes | MeshError) -> None:
        if not self._is_abandoned:
            await self._lines.put(item)


def connection_lost(exc: Exception) -> StageLostError:
    """The error for a server that cannot be reached, or whose connection broke."""
    return StageLostError(f"the connection to RKLLAMA was lost: {str(exc) or type(exc).__name__}")


async def split_lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """The lines of a stream as they are complete. Raises EngineError for a line above MAX_LINE_BYTES."""
    held = b""
    async for part in content.iter_any():
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            yield line
        if len(held) > MAX_LINE_BYTES:
            raise EngineError(f"RKLLAMA sent a line of more than {MAX_LINE_BYTES} bytes")
    if held:
        yield held


async def _bounded(content: aiohttp.StreamReader, max_bytes: int) -> bytes:
    """The whole content. Raises EngineError if it has more than max_bytes."""
    read = bytearray()
    async for part in content.iter_any():
        read += part
        if len(read) > max_bytes:
            raise EngineError(f"RKLLAMA sent more than {max_bytes} bytes where few were expected")
    return bytes(read)


def _as_json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")

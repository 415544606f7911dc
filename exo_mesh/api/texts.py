"""The text models in use: opened once, and all their blocking work done in worker threads."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from exo_mesh.errors import DeadlineError, ModelError
from exo_mesh.model_files import named
from exo_mesh.text.template import RENDER_LIMIT_S
from exo_mesh.text.tokenizer import TextModel

T = TypeVar("T")

MAX_OPEN = 8  # text models kept open; one of a large vocabulary takes some 50 MB
NUM_WORKERS = 2
WORK_LIMIT_S = 30.0  # templates stop by themselves long before; this covers megabytes of text to tokenize


class TextModels:
    """A small cache of TextModel by directory, and the threads that open and use them."""

    def __init__(self, template_limit_s: float = RENDER_LIMIT_S) -> None:
        self.template_limit_s = template_limit_s
        self._open: OrderedDict[tuple[Path, int], TextModel] = OrderedDict()
        self._opening = asyncio.Lock()
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="exo-mesh-text")

    async def get(self, directory: Path) -> TextModel:
        """The text model of a directory; read again if its tokenizer.json has changed. Raises ModelError."""
        async with self._opening:
            key = (directory, await self.work(lambda: _modified_ns(directory)))
            if key not in self._open:
                self._open[key] = await self.work(lambda: TextModel.open(directory))
                if len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)
            self._open.move_to_end(key)
            return self._open[key]

    async def work(self, job: Callable[[], T]) -> T:
        """Run blocking text work in a thread. Raises what it raises, or DeadlineError."""
        future = asyncio.get_running_loop().run_in_executor(self._workers, job)
        try:
            async with asyncio.timeout(WORK_LIMIT_S):
                return await future
        except TimeoutError as exc:
            raise DeadlineError(f"the text of this request took more than {WORK_LIMIT_S:.0f} s to prepare") from exc

    def close(self) -> None:
        """Let the threads go; work that has not begun is dropped."""
        self._workers.shutdown(wait=False, cancel_futures=True)


def _modified_ns(directory: Path) -> int:
    try:
        return (directory / "tokenizer.json").stat().st_mtime_ns
    except OSError as exc:
        raise ModelError(f"{named(directory / 'tokenizer.json')}: cannot be read: {exc.strerror}") from exc

"""Runs tokenizers in child processes: for long texts, and for tokenizers that may make a text longer or take long.

A tokenizer comes from a stranger, and its library stops all other work of the node while it encodes. So a node encodes
only short texts itself, and those only with tokenizers whose parts are all listed in `text/tokenizer_bounds.py`. All
else runs in a process with limits on memory and time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from exo_mesh.api.core.child_processes import WAIT_LIMIT_S, ChildMemory, ChildProcesses
from exo_mesh.api.core.near_tokenizer import IDLE_S, NearTokenizer
from exo_mesh.api.core.renderer_process import RendererLostError, RendererProcess
from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.long_texts import slices
from exo_mesh.base.tasks import Watchdog
from exo_mesh.errors import DeadlineError, InputError, ModelError, NotReadyError
from exo_mesh.text.recent_failures import RecentFailures
from exo_mesh.text.template_wire import (
    Answer,
    Framed,
    GivenText,
    OpenTokenizer,
    ReadTokenizer,
    TableAnswered,
    TemplateUnknown,
    TokenizerMethod,
    TokenizerPart,
    TokenizerRefused,
    UseTokenizer,
    frame,
)
from exo_mesh.text.token_table import TokenTable
from exo_mesh.text.tokenizer import TextModel
from exo_mesh.text.tokenizer_bounds import TokenizerBounds
from exo_mesh.text.tokenizer_calls import error_of, result_of

MEMORY = ChildMemory(growth_bytes=1 << 30, kept_bytes=384 << 20)
"""Two large vocabularies take 100 MB, and a prompt of a million tokens 400 MB."""

OPEN_LIMIT_S = 15.0
"""Time limit for reading a tokenizer: 1 s for a large one."""

LIMIT_S = 5.0
"""Time limit for a text of a few characters."""

CHARACTERS_PER_S = 500_000
"""How many characters a process encodes in a second, at least; longer texts have that much more time."""

MAX_LIMIT_S = 25.0
"""Longest time limit; a request waits no longer for its text."""

LONG_TEXT = 1 << 20
"""A text of more characters is at fault itself if a tokenizer exceeds its limits with it."""

_LONE_SURROGATE = "the text contains a lone surrogate (U+D800 to U+DFFF)"

_log = logging.getLogger(__name__)


class FarTokenizers:
    """Owns the tokenizer processes of a node."""

    def __init__(self, limit_s: float = LIMIT_S, *, memory: ChildMemory = MEMORY, clock: Clock = monotonic) -> None:
        """limit_s: time limit for a short text."""
        self._limit_s = limit_s
        self._children = ChildProcesses("long texts and unusual tokenizers", memory, clock)
        self._near = NearTokenizer(clock)
        self._idle_watch = Watchdog(IDLE_S / 10, clock)
        self._loop_thread = 0
        self._calls: set[Future[Any]] = set()
        self._failures = RecentFailures(clock)  # of tokenizers that exceeded their limits with a text that is not long

    @property
    def pids(self) -> set[int]:
        """The pids of the processes that have not ended."""
        return self._children.pids | self._near.pids

    def read(
        self, directory: Path, version: int, note_s: Callable[[float], None]
    ) -> tuple[TokenTable, TokenizerBounds]:
        """The table of a large tokenizer, which a process reads. version: as in `attached`; note_s: gets the time that
        it took. It blocks. Raises ModelError, NotReadyError and DeadlineError."""
        base, began = _key(directory, version), monotonic()
        self._failures.recall(base.encode())
        try:
            answers = self._near.read(ReadTokenizer(base, str(directory), OPEN_LIMIT_S))
        except RendererLostError as exc:
            note_s(monotonic() - began)
            error = ModelError(f"the tokenizer of {directory.name} {exc} while it is read")
            self._failures.note(base.encode(), error)
            raise error from exc
        if isinstance(last := answers[-1], TokenizerRefused):
            note_s(monotonic() - began)
            raise error_of(last, directory.name)
        head, *parts = [one for one in answers if isinstance(one, TableAnswered)]
        assert head.head is not None and head.bounds is not None
        note_s(parts[-1].cpu_s)
        return TokenTable(head.head, [one.part for one in parts if one.part is not None]), head.bounds

    def attached(self, text: TextModel, directory: Path, version: int) -> TextModel:
        """The text model with its long texts sent to the processes. version: changes with the files. Call it on the
        event loop."""
        loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        written = text.template.written if text.template is not None else None
        base, key = _key(directory, version), _key(directory, version, written)
        opening = OpenTokenizer(key, base, str(directory), written, OPEN_LIMIT_S)

        def call(method: TokenizerMethod, given: str, args: list[Any]) -> Any:
            question = UseTokenizer(key, method, args, min(MAX_LIMIT_S, self._limit_s + len(given) / CHARACTERS_PER_S))
            return self._wait(loop, text.name, opening, question, given)

        def call_near(method: TokenizerMethod, given: str, args: list[Any]) -> Any:
            question = UseTokenizer(key, method, args, self._limit_s)
            return self._ask_near(text.name, opening, question, given)

        is_table = isinstance(text.tokenizer, TokenTable)
        if is_table:
            self._idle_watch.watch(self._near.end_idle)
        return replace(text, elsewhere=call, nearby=call_near if is_table else None)

    async def close(self) -> None:
        """End all processes. Threads that wait for an answer get an error."""
        for call in list(self._calls):
            call.cancel()
        self._idle_watch.forget(self._near.end_idle)
        await asyncio.to_thread(self._near.close)
        await self._children.close()

    def _wait(
        self, loop: asyncio.AbstractEventLoop, name: str, opening: OpenTokenizer, question: UseTokenizer, text: str
    ) -> Any:
        """The result of a method; a thread waits for it here while the loop asks a process. Raises InputError on the
        loop itself, which would wait for ever."""
        if threading.get_ident() == self._loop_thread:
            raise InputError(f"the tokenizer of {name} cannot be used here")
        call = asyncio.run_coroutine_threadsafe(self._ask(name, opening, question, text), loop)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            answers = call.result(WAIT_LIMIT_S + OPEN_LIMIT_S + MAX_LIMIT_S)
        except CancelledError as exc:
            raise NotReadyError("this node is stopping") from exc
        except TimeoutError as exc:
            call.cancel()
            raise DeadlineError(f"the tokenizer of {name} did not answer in time; try again") from exc
        return _result(name, question, answers)

    def _ask_near(self, name: str, opening: OpenTokenizer, question: UseTokenizer, text: str) -> Any:
        """The result of a method for a short text; on the event loop it blocks for half a second at most, in other
        threads until the tokenizer is read. Raises as `_wait`."""
        is_loop = threading.get_ident() == self._loop_thread
        try:
            return _result(name, question, self._near.ask(opening, question, text, at_once=is_loop))
        except DeadlineError as exc:
            if is_loop:
                raise InputError(f"the tokenizer of {name} cannot be used here now") from exc
            raise
        except UnicodeEncodeError as exc:
            raise InputError(_LONE_SURROGATE) from exc
        except RendererLostError as exc:
            _log.warning("%s: the tokenizer %s with a text of %d characters", name, exc, len(text))
            raise ModelError(f"the tokenizer of {name} {exc} with a text of {len(text)} characters") from exc

    async def _ask(self, name: str, opening: OpenTokenizer, question: UseTokenizer, text: str) -> list[Answer]:
        """The answer of a process, in parts. Raises ModelError for a tokenizer that exceeds the limits, and InputError
        if a long text may be the reason."""
        self._failures.recall(question.key.encode())
        try:
            async with self._children.lend(question.key) as process:
                self._failures.recall(question.key.encode())  # it may have failed while this request waited
                answers = await self._ask_process(process, question, text)
                if isinstance(answers[-1], TemplateUnknown):
                    opened = await process.ask(frame(opening), OPEN_LIMIT_S + 1)
                    if isinstance(opened, TokenizerRefused):
                        return [opened]
                    answers = await self._ask_process(process, question, text)
        except RendererLostError as exc:
            _log.warning("%s: the tokenizer %s with a text of %d characters", name, exc, len(text))
            if len(text) > LONG_TEXT:
                message = f"the tokenizer of {name} {exc} with this text of {len(text)} characters; shorten the text"
                raise InputError(message) from exc
            error = ModelError(f"the tokenizer of {name} {exc} with a text of {len(text)} characters")
            self._failures.note(question.key.encode(), error)
            raise error from exc
        return answers

    async def _ask_process(self, process: RendererProcess, question: UseTokenizer, text: str) -> list[Answer]:
        try:
            return await process.ask_in_parts(_framed(question, text), question.limit_s + 1)
        except UnicodeEncodeError as exc:
            raise InputError(_LONE_SURROGATE) from exc


def _key(directory: Path, version: int, *written: str | None) -> str:
    """The key of the files of a model, or of these together with what its template writes."""
    label = "\0".join(map(str, (directory, version, *written)))
    return hashlib.sha256(label.encode("utf-8", "surrogatepass")).hexdigest()


def _result(name: str, question: UseTokenizer, answers: Sequence[Answer]) -> Any:
    """What a method has returned. Raises its error."""
    last = answers[-1]
    if isinstance(last, TokenizerRefused):
        raise error_of(last, name)
    assert isinstance(last, TokenizerPart)
    return result_of(question, [part for part in answers if isinstance(part, TokenizerPart)])


def _framed(question: UseTokenizer, text: str) -> Iterator[Framed]:
    """The messages of a question, made one by one. Raises UnicodeEncodeError for a lone surrogate."""
    for part in slices(text):
        yield frame(GivenText(part))
    yield frame(question)

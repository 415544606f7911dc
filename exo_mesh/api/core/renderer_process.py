"""One child process that renders chat templates, seen from the node."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress

import msgspec
import psutil

from exo_mesh.base.printable import reason_of
from exo_mesh.errors import NotReadyError
from exo_mesh.text.template_wire import (
    EXIT_OUT_OF_MEMORY,
    LENGTH,
    MAX_ANSWER_BYTES,
    Answer,
    Framed,
    RendererReady,
    TableAnswered,
    TemplateRefused,
    TemplateRendered,
    TokenizerPart,
    TokenizerRefused,
)

START_LIMIT_S = 30.0
"""Time limit for a start. A process starts in 0.1 s; on a busy small board it takes seconds."""

EXIT_LIMIT_S = 1.0
"""How long to wait for the exit code of a process that has closed its pipe."""

MAX_PARTS = 1 << 10
"""Most parts of an answer: 67 million tokens, more than any prompt has."""

PIPE_BYTES = 1 << 16
"""Bytes that are written at a time; a pipe of Linux holds as many."""

ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
"""For libraries: the process may start no other thread."""

_PASSED_ON = ("PATH", "HOME", "TZ", "LANG", "VIRTUAL_ENV", "TMPDIR")
_PASSED_ON_PREFIXES = ("PYTHON", "LC_", "LD_", "DYLD_")

PARTS = (TokenizerPart, TemplateRendered, TableAnswered)
"""Answers that other parts may follow."""

_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


class RendererLostError(Exception):
    """The process cannot be used any more. The message completes the sentence "the chat template …"."""


class RendererProcess:
    """One renderer process. It answers one question at a time. After RendererLostError or a cancelled question the
    owner must kill it."""

    def __init__(self, process: asyncio.subprocess.Process, most_resident_bytes: int) -> None:
        self._process = process
        self._most_resident_bytes = most_resident_bytes
        self._measured: psutil.Process | None = None  # set once the process is ready
        self._is_too_large = False
        self._is_asked = False
        self._is_spent = False

    @classmethod
    async def spawn(cls, growth_bytes: int, most_resident_bytes: int) -> RendererProcess:
        """Start a process. growth_bytes: by how much its address space may grow, if the system can limit that;
        most_resident_bytes: the resident memory above which `watch_memory` kills it. Raises NotReadyError."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "exo_mesh.text.template_child", str(growth_bytes)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**renderer_environment(os.environ), **ONE_THREAD},
                start_new_session=True,
            )
        except OSError as exc:
            raise NotReadyError(f"the process that renders chat templates cannot be started: {reason_of(exc)}") from exc
        return cls(process, most_resident_bytes)

    async def ready(self) -> None:
        """Wait until the process can take questions. Raises NotReadyError with the last line of its stderr."""
        try:
            async with asyncio.timeout(START_LIMIT_S):
                answer = await self._read()
            self._measured = psutil.Process(self.pid)
        except (OSError, asyncio.IncompleteReadError, RendererLostError, msgspec.DecodeError, psutil.Error) as exc:
            self.kill()
            _, errors = await self._process.communicate()
            words = errors.decode(errors="replace").strip().rpartition("\n")[2][:300] or type(exc).__name__
            raise NotReadyError(f"the process that renders chat templates did not start: {words}") from exc
        if not isinstance(answer, RendererReady):
            raise NotReadyError("the process that renders chat templates has another version; restart the node")

    @property
    def is_usable(self) -> bool:
        """Whether the process runs, waits for a question, and still has memory for one."""
        assert self._process.stdout is not None
        runs = self._process.returncode is None and not self._process.stdout.at_eof()
        return runs and not self._is_asked and not self._is_spent

    @property
    def pid(self) -> int:
        return self._process.pid

    def resident_bytes(self) -> int:
        """The process's resident memory; 0 before it is ready and after it has ended."""
        if self._measured is not None:
            with suppress(psutil.Error):
                return int(self._measured.memory_info().rss)
        return 0

    async def ask(self, question: Framed, limit_s: float) -> Answer:
        """Send a framed question and wait for the answer. Raises as `ask_in_parts`."""
        return (await self.ask_in_parts([question], limit_s))[0]

    async def ask_in_parts(self, questions: Iterable[Framed], limit_s: float) -> list[Answer]:
        """Send the framed parts of a question and wait for all parts of its answer. Raises RendererLostError, and
        NotReadyError if the process is stopped by a signal, which is no fault of the template."""
        assert self._process.stdin is not None
        self._is_asked = True
        with suppress(ProcessLookupError):  # it may have been stopped since its last answer
            self._process.send_signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(limit_s):
                for question in questions:
                    with memoryview(question) as whole:
                        for start in range(0, len(whole), PIPE_BYTES):  # asyncio copies what the pipe does not take
                            self._process.stdin.write(whole[start : start + PIPE_BYTES])
                            await self._process.stdin.drain()
                answers = [await self._read()]
                while isinstance(part := answers[-1], PARTS) and not part.is_last:
                    if len(answers) >= MAX_PARTS:
                        raise RendererLostError(f"outputs {MAX_PARTS} parts, which is too much")
                    answers.append(await self._read())
        except TimeoutError as exc:
            if self._is_stopped():
                words = "the process that renders chat templates was stopped by a signal; try again"
                raise NotReadyError(words) from exc
            raise RendererLostError(f"runs too long: it was stopped after {limit_s:g} s") from exc
        except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError) as exc:
            raise RendererLostError(await self._fate()) from exc
        self._is_asked = False
        last = answers[-1]
        self._is_spent = isinstance(last, TemplateRefused | TokenizerRefused) and last.is_spent
        return answers

    def watch_memory(self, _now: float) -> float:
        """Kill the process if it is too large. A check for a Watchdog, for systems that cannot limit its memory."""
        if self.resident_bytes() > self._most_resident_bytes:
            self._is_too_large = True
            self.kill()
        return math.inf

    def kill(self) -> None:
        """Kill the process at once; it holds no data that could be lost."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def closed(self) -> None:
        """Wait until the process has ended and its pipes are closed."""
        await self._process.wait()
        with suppress(RuntimeError):  # a question is still reading its answer, and closes the pipe itself
            await self._process.communicate()

    async def _read(self) -> Answer:
        assert self._process.stdout is not None
        (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        if length > MAX_ANSWER_BYTES:
            raise RendererLostError(f"outputs {length} bytes, which is too much")
        return _answers.decode(await self._process.stdout.readexactly(length))

    def _is_stopped(self) -> bool:
        """Whether the system shows the process as stopped by a signal."""
        with suppress(psutil.Error):
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return False

    async def _fate(self) -> str:
        """The reason why the process does not answer, as the message of a RendererLostError."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_LIMIT_S):
                await self._process.wait()
        code = self._process.returncode
        if self._is_too_large or code == EXIT_OUT_OF_MEMORY:
            return "needs too much memory"
        if code == -signal.SIGXCPU:
            return "runs too long"
        how = "a broken answer" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"crashed the process that renders it ({how}); it may need too much memory"


def renderer_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that Python needs to start and to know the time zone; all others, including secrets, are
    removed."""
    return {
        name: value for name, value in environ.items() if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }

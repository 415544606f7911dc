"""A process that encodes short texts with large tokenizers. Threads call it without the event loop.

A short text is encoded in 0.1 ms, which is less than the turns of the event loop that the other processes take. So the
thread that needs the tokens writes the text into a socket, and waits for them itself.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

import msgspec

from exo_mesh.api.core.renderer_process import ONE_THREAD, PARTS, RendererLostError, renderer_environment
from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.printable import reason_of
from exo_mesh.errors import DeadlineError, NotReadyError
from exo_mesh.text.template_wire import (
    LENGTH,
    MAX_ANSWER_BYTES,
    Answer,
    GivenText,
    OpenTokenizer,
    Question,
    ReadTokenizer,
    RendererReady,
    TemplateUnknown,
    TokenizerQuestion,
    TokenizerRefused,
    UseTokenizer,
    frame,
)

GROWTH_BYTES = 1 << 30
"""By how much the process may grow. What it keeps is bounded by `MAX_KEPT_BYTES` of text/tokenizer_calls.py."""

IDLE_S = 3600.0
"""It is ended after so long without a text. A large tokenizer takes a second to be read again."""

WAIT_LIMIT_S = 20.0
"""How long a text waits for others, each of which takes some milliseconds, and for tokenizers that are read."""

AT_ONCE_S = 0.05
"""How long the event loop waits for the texts of others."""

ANSWER_AT_ONCE_S = 0.5
"""How long the event loop waits for the answer, which takes a fraction of a millisecond: the process hangs then."""

START_LIMIT_S = 30.0

_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


class NearTokenizer:
    """One process, started on first use and replaced when it fails. Safe to use from several threads."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: BinaryIO | None = None
        self._socket: socket.socket | None = None
        self._used_at = 0.0
        self._is_closed = False

    @property
    def pids(self) -> set[int]:
        process = self._process
        return set() if process is None else {process.pid}

    def read(self, question: ReadTokenizer) -> list[Answer]:
        """A tokenizer as a table. It blocks. Raises as `ask`."""
        return self._in_turn(lambda: self._sent(question, ""))

    def ask(self, opening: OpenTokenizer, question: UseTokenizer, text: str, *, at_once: bool = False) -> list[Answer]:
        """The answer in parts; the tokenizer is opened first if the process does not have it. It blocks; at_once: no
        longer than AT_ONCE_S and ANSWER_AT_ONCE_S. Raises RendererLostError, NotReadyError, DeadlineError if it is busy
        or, with at_once, does not have the tokenizer, and UnicodeEncodeError for a lone surrogate."""

        def asked() -> list[Answer]:
            answers = self._sent(question, text, ANSWER_AT_ONCE_S if at_once else math.inf)
            if isinstance(answers[-1], TemplateUnknown):
                if at_once:
                    raise DeadlineError("the process for short texts does not have the tokenizer")
                opened = self._sent(opening, "")
                if isinstance(opened[-1], TokenizerRefused):
                    return opened
                answers = self._sent(question, text)
            return answers

        return self._in_turn(asked, at_once=at_once)

    def _in_turn(self, work: Callable[[], list[Answer]], *, at_once: bool = False) -> list[Answer]:
        wait_s = AT_ONCE_S if at_once else WAIT_LIMIT_S
        if not self._lock.acquire(timeout=wait_s):
            raise DeadlineError(f"the process for short texts was busy for {wait_s:g} s; try again")
        try:
            is_new = self._process is None
            if is_new and at_once:
                raise DeadlineError("the process for short texts is not there")
            try:
                self._start()
                answers = work()
            except ConnectionError:
                if is_new or at_once:
                    raise
                self._end()  # it has ended since the last text: another one is started
                self._start()
                answers = work()
            if isinstance(last := answers[-1], TokenizerRefused) and last.is_spent:
                self._end()
            return answers
        except TimeoutError as exc:
            self._end()
            raise RendererLostError("runs too long") from exc
        except (OSError, msgspec.DecodeError) as exc:
            self._end()
            raise RendererLostError(f"crashed its process ({reason_of(exc)}); it may need too much memory") from exc
        finally:
            self._used_at = self._clock()
            self._lock.release()

    def end_idle(self, now: float) -> float:
        """End the process if it was idle for IDLE_S; a check for a Watchdog. Returns the time of the next check."""
        if self._process is None or not self._lock.acquire(blocking=False):
            return now + IDLE_S
        try:
            if now - self._used_at >= IDLE_S:
                self._end()
            return self._used_at + IDLE_S if self._process is not None else math.inf
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the process. A thread that waits for an answer gets an error. It blocks for the end of the process."""
        self._is_closed = True
        if (process := self._process) is not None:
            with suppress(ProcessLookupError):
                process.kill()
        with self._lock:
            self._end()

    def _sent(self, question: TokenizerQuestion, text: str, most_s: float = math.inf) -> list[Answer]:
        """The answer in parts. most_s: limit of each wait, if that is less than the question's."""
        assert self._socket is not None
        messages: list[Question] = [GivenText(text)] if text else []
        framed = b"".join(frame(one) for one in [*messages, question])
        self._socket.settimeout(min(question.limit_s + 1, most_s))
        self._socket.sendall(framed)
        answers = [self._read()]
        while isinstance(part := answers[-1], PARTS) and not part.is_last:
            answers.append(self._read())
        return answers

    def _read(self) -> Answer:
        assert self._stream is not None
        head = self._stream.read(LENGTH.size)
        if len(head) < LENGTH.size:
            raise ConnectionResetError("it has ended")
        (length,) = LENGTH.unpack(head)
        if length > MAX_ANSWER_BYTES:
            raise OSError(f"its answer has {length} bytes")
        body = self._stream.read(length)
        if len(body) < length:
            raise ConnectionResetError("it has ended")
        return _answers.decode(body)

    def _start(self) -> None:
        if self._is_closed:
            raise NotReadyError("this node is stopping")
        if self._process is not None:
            return
        environ: dict[str, str] = {**renderer_environment(os.environ), **ONE_THREAD}
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "exo_mesh.text.template_child", str(GROWTH_BYTES)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env=environ,
                start_new_session=True,
            )
        except OSError as exc:
            ours.close()
            raise NotReadyError(f"the process for short texts cannot be started: {reason_of(exc)}") from exc
        finally:
            theirs.close()
        self._socket, self._stream = ours, ours.makefile("rb")
        ours.settimeout(START_LIMIT_S)
        if not isinstance(self._read(), RendererReady):
            raise OSError("it has another version")

    def _end(self) -> None:
        process, self._process = self._process, None
        for one in (self._stream, self._socket):
            if one is not None:
                one.close()
        self._stream = self._socket = None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()

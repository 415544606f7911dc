"""Runs child processes that answer lines with lines, such as those of rings/runner/asking/measure.py."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from exo_mesh.engine.process_environment import compute_environment
from exo_mesh.errors import EngineError
from exo_mesh.rings.hosting.runner_child import RUNNER_ENVIRONMENT

MAX_LINE = 1 << 20


def engine_command(engine: str, model_dir: Path, options: Mapping[str, str], deadline_s: float) -> list[str]:
    """The command line of a measuring child, without the task."""
    pairs = [word for key, value in options.items() for word in ("--option", f"{key}={value}")]
    child = [sys.executable, "-m", "exo_mesh.rings.runner.asking.measure", engine, str(model_dir)]
    return [*child, *pairs, "--deadline", str(deadline_s)]


def ask_once(command: Sequence[str], deadline_s: float) -> dict[str, Any]:
    """Runs a child and reads its one answer. Raises EngineError with the child's reason if it fails."""
    with MeasuringChild(command, deadline_s) as child:
        return child.read()


class LineChild:
    """A process that answers lines with lines, for use in a `with`: it starts at the entry and is killed at the exit.

    All its methods raise EngineError with the child's last words if it has ended or is late. what: its name in errors.
    """

    def __init__(self, command: Sequence[str], what: str, environ: Mapping[str, str] | None = None) -> None:
        self._command, self._what, self._environ = list(command), what, environ
        self._rest = b""

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()  # not a pipe, which would fill up unread and block the child
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=self._log, bufsize=0, env=self._environ
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self._log):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def tell(self, line: str) -> None:
        """Sends a line."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
        except OSError as exc:
            raise EngineError(self._last_words()) from exc

    def end(self) -> None:
        """Closes the child's input, which ends it; what it says last can still be read."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def line(self, deadline_s: float) -> bytes:
        """Reads the next line."""
        assert self.process.stdout is not None
        end = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise EngineError(f"{self._what} did not answer in time")
                piece = os.read(self.process.stdout.fileno(), 65536)
                if not piece or len(self._rest) > MAX_LINE:
                    raise EngineError(self._last_words())
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4000))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"{self._what} ended: {lines[-1][:300] if lines else 'without output'}"


class MeasuringChild(LineChild):
    """A measuring process, with a deadline for all its answers."""

    def __init__(self, command: Sequence[str], deadline_s: float) -> None:
        # the same allocator settings as for a stage
        super().__init__(command, "the measuring process", {**compute_environment(os.environ), **RUNNER_ENVIRONMENT})
        self._end = time.monotonic() + deadline_s

    def ask(self, line: str) -> dict[str, Any]:
        """Sends a line and reads the answer. Raises EngineError."""
        self.tell(line)
        return self.read()

    def read(self) -> dict[str, Any]:
        """Reads the next answer. Raises EngineError with the child's reason or last log line, or if it is late."""
        answer = json.loads(self.line(self._end - time.monotonic()))
        if "error" in answer:
            raise EngineError(str(answer["error"]))
        return dict(answer)

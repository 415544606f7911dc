"""Runs child processes that measure engines (exo_mesh/rings/runner/measure.py), with lines of JSON and a deadline."""

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
from typing import Any

from exo_mesh.engine.process_environment import compute_environment
from exo_mesh.errors import EngineError
from exo_mesh.rings.hosting.runner_child import RUNNER_ENVIRONMENT

MAX_LINE = 1 << 20


def engine_command(engine: str, model_dir: Path, options: Mapping[str, str], deadline_s: float) -> list[str]:
    """The command line of a measuring child, without the task."""
    pairs = [word for key, value in options.items() for word in ("--option", f"{key}={value}")]
    child = [sys.executable, "-m", "exo_mesh.rings.runner.measure", engine, str(model_dir)]
    return [*child, *pairs, "--deadline", str(deadline_s)]


def ask_once(command: Sequence[str], deadline_s: float) -> dict[str, Any]:
    """Runs a child and reads its one answer. Raises EngineError with the child's reason if it fails."""
    with MeasuringChild(command, deadline_s) as child:
        return child.read()


class MeasuringChild:
    """A measuring process, for use in a `with`: it starts at the entry and is killed at the exit."""

    def __init__(self, command: Sequence[str], deadline_s: float) -> None:
        self._command = list(command)
        self._end = time.monotonic() + deadline_s
        self._rest = b""

    def __enter__(self) -> MeasuringChild:
        self._log = tempfile.TemporaryFile()  # not a pipe, which would fill up unread and block the child
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            env={**compute_environment(os.environ), **RUNNER_ENVIRONMENT},  # the same allocator settings as for a stage
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def ask(self, line: str) -> dict[str, Any]:
        """Sends a line and reads the answer. Raises EngineError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except OSError as exc:
            raise EngineError(self._last_words()) from exc
        return self.read()

    def read(self) -> dict[str, Any]:
        """Reads the next answer. Raises EngineError with the child's reason or last log line, or if it is late."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, self._end - time.monotonic())):
                    raise EngineError("the measuring process did not answer in time")
                piece = os.read(self._process.stdout.fileno(), 65536)
                if not piece or len(self._rest) > MAX_LINE:
                    raise EngineError(self._last_words())
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(str(answer["error"]))
        return dict(answer)

    def _last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4000))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"the measuring process ended: {lines[-1][:300] if lines else 'without output'}"

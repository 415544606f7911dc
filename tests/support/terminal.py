"""A program in a terminal of a given size, as a person has it: a real pty."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[=>]|\r")


class Terminal:
    """`shown` is all that the program has written, with its control sequences."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], size: tuple[int, int] = (80, 24)) -> None:
        """size: columns, rows."""
        self._fd, inside = pty.openpty()
        self.resize(*size)
        self.shown = ""
        kept = {name: value for name, value in environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            argv, stdin=inside, stdout=inside, stderr=inside, env={"TERM": "xterm-256color", **kept, **_only(environ)},
            start_new_session=True, preexec_fn=_take_terminal,  # noqa: PLW1509  (one system call, no lock)
        )  # fmt: skip
        os.close(inside)
        self._at = 0

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def send(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, text: str, deadline_s: float = 30.0) -> str:
        """Until the text is shown after the last that was waited for; what was shown up to it, without control
        sequences."""
        end = time.monotonic() + deadline_s
        while (found := plain(self.shown[self._at :]).find(text)) < 0:
            assert time.monotonic() < end, f"{text!r} is not in {plain(self.shown[self._at :])!r}"
            assert self._read(0.1) or self.process.poll() is None, f"ended without {text!r}: {plain(self.shown)!r}"
        seen = plain(self.shown[self._at :])[: found + len(text)]
        raw_end = next(end for end in range(len(self.shown) + 1) if plain(self.shown[self._at : end]) == seen)
        self._at = raw_end
        return seen

    def interrupt(self, text: str, deadline_s: float = 30.0) -> str:
        """Press Ctrl-C until the program answers with text: while Python waits in readline, the first may go unheard
        until the next key (the signal comes between its check and its select)."""
        end = time.monotonic() + deadline_s
        while True:
            self.send("\x03")
            try:
                return self.wait_for(text, min(3.0, deadline_s))
            except AssertionError:
                if self.process.poll() is not None or time.monotonic() >= end:
                    raise

    def wait_end(self, deadline_s: float = 15.0) -> int:
        """The exit code."""
        end = time.monotonic() + deadline_s
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it goes on: {plain(self.shown[-2000:])!r}"
            self._read(0.05)
        while self._read(0):
            pass
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._fd)

    def _read(self, patience_s: float) -> bool:
        if not select.select([self._fd], [], [], patience_s)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux: the other end is closed
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


def _take_terminal() -> None:
    """Ctrl-C goes to the session whose terminal this is."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(argv: Sequence[str], environ: Mapping[str, str], size: tuple[int, int] = (80, 24)) -> Iterator[Terminal]:
    opened = Terminal(argv, environ, size)
    try:
        yield opened
    finally:
        opened.close()


def plain(text: str) -> str:
    """Without control sequences."""
    return _CONTROL.sub("", text)


def _only(environ: Mapping[str, str]) -> dict[str, str]:
    return {"NO_COLOR": environ["NO_COLOR"]} if "NO_COLOR" in environ else {}

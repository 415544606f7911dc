"""`python -m exo_mesh.models.fetcher`: fetches model files for a node (see wire.py). Ends with its input."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading
from functools import partial

import msgspec

from exo_mesh.errors import FetchError
from exo_mesh.models.fetcher import peer_source
from exo_mesh.models.fetcher.duty import DutyCycle
from exo_mesh.models.fetcher.service import FetcherService
from exo_mesh.models.fetcher.source import ModelFiles
from exo_mesh.models.fetcher.wire import MAX_LINE_BYTES, Answer, Request, Source, Tls
from exo_mesh.models.file_server.pace import CopyPace

MEMORY_BYTES = 2 * 2**30
"""Limit of the address space, on Linux: most of it is reserved and never used."""

STACK_BYTES = 2**20

_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)


def main() -> None:
    """Serves until standard input ends, and then exits at once: a later fetch resumes from the bytes on the disk."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node ends this process, not the terminal
    if sys.platform == "linux":
        _limit_memory()
    threading.stack_size(STACK_BYTES)
    duty = DutyCycle()
    opener = partial(open_peer, pace=CopyPace(lambda: duty.is_busy))
    service = FetcherService(_Output().send, opener, duty)
    while line := sys.stdin.buffer.readline(MAX_LINE_BYTES):
        service.handle(_requests.decode(line))
    os._exit(0)


def open_peer(source: Source, name: str, tls: Tls | None, *, pace: CopyPace) -> ModelFiles:
    """Opens the files of a model at a peer. pace: shared by all copies of this process. Raises FetchError."""
    try:
        return peer_source.open_peer(source, name, tls, pace=pace)
    except ValueError as exc:
        raise FetchError(f"the credentials of this node cannot be used: {exc}", is_final=True) from exc


class _Output:
    """Standard output, one answer per line. If the reader is gone, this process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stream = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output that a library prints must not become an answer

    def send(self, answer: Answer) -> None:
        try:
            with self._lock:
                self._stream.write(msgspec.json.encode(answer) + b"\n")
                self._stream.flush()
        except OSError:
            os._exit(0)


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))  # affects children that set no limit of their own


if __name__ == "__main__":
    main()

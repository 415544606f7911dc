"""Reads the small files that people write for a node, such as settings, secrets and lists of peers.

A file that cannot be read must not count as a missing one: without its secret a mesh would be open.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from pathlib import Path

from exo_mesh.base.clock import monotonic

PIPE_WAIT_S = 30.0
"""Most time that a pipe may be silent, as in `--secret-file <(pass mesh)`, where a person may type a passphrase."""


def exists(path: Path) -> bool:
    """Whether there is anything at a path, also a link whose target is missing. Raises OSError if that is unknown."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True


def read_small(path: Path, max_bytes: int, *, pipe_wait_s: float | None = None) -> bytes:
    """Reads a file, a device or a pipe; one byte more than max_bytes if it has more. Blocking.

    pipe_wait_s: how long a pipe may be silent, by default PIPE_WAIT_S. Raises OSError whose strerror says why.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        if exists(path):
            raise FileNotFoundError(errno.ENOENT, "it is a link to a file that does not exist", str(path)) from exc
        raise
    try:
        return _read(descriptor, path, max_bytes, PIPE_WAIT_S if pipe_wait_s is None else pipe_wait_s)
    finally:
        os.close(descriptor)


def _read(descriptor: int, path: Path, max_bytes: int, pipe_wait_s: float) -> bytes:
    is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    content, give_up_at = b"", monotonic() + pipe_wait_s
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while len(content) <= max_bytes:
        if not is_regular and not poller.poll(max(0.0, give_up_at - monotonic()) * 1000):
            raise TimeoutError(errno.ETIMEDOUT, f"the pipe was silent for {pipe_wait_s:g} s", str(path))
        part = os.read(descriptor, max_bytes + 1 - len(content))
        if not part:
            break
        content += part
    return content

"""Sets how the C library's allocator shares memory among the threads of this process."""

from __future__ import annotations

import contextlib
import sys

_M_ARENA_MAX = -8
"""From <malloc.h>."""


def use_one_arena() -> bool:
    """Let all threads allocate from the same memory; returns whether the C library can. Call before threads start.

    glibc gives each thread an arena of its own. The threads of gRPC allocate and free parts of the same messages, which
    leaves holes in every arena: an idle node grew by 5 MB in two hours, although Python held no object more.
    """
    if sys.platform != "linux":
        return False
    import ctypes  # only for a process that becomes a node

    with contextlib.suppress(AttributeError, OSError):  # musl has one arena, and no mallopt
        return bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1))
    return False

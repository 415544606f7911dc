"""Sets how the C library's allocator shares memory among the threads of this process, and when it gives memory back."""

from __future__ import annotations

import contextlib
import sys

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""From <malloc.h>."""

MAPPED_BYTES = 1 << 20
"""Blocks from this size on go back to the system as soon as they are freed. glibc would raise its limit to the size of
the largest body that was ever freed, and then keep the memory of bodies."""


def use_one_arena() -> bool:
    """Let all threads allocate from the same memory, and give large blocks back at once; returns whether the C library
    can. Call before threads start.

    glibc gives each thread an arena of its own. The threads of gRPC allocate and free parts of the same messages, which
    leaves holes in every arena: an idle node grew by 5 MB in two hours, although Python held no object more.
    """
    if sys.platform != "linux":
        return False
    import ctypes  # only for a process that becomes a node

    with contextlib.suppress(AttributeError, OSError):  # musl has one arena, and no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_M_ARENA_MAX, 1)) and bool(mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES))
    return False

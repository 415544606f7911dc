"""Runs deeply recursive compiled code in a thread with a large stack, because a stack overflow ends the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 128 << 20
"""Stack size of such a thread; the default is 8 MiB. The deepest chain of rules in the largest grammar uses half of it.
Only the pages that are used cost memory."""

_lock = threading.Lock()


def in_deep_stack(work: Callable[[], T]) -> T:
    """Run `work` in a new thread with a stack of STACK_BYTES and wait for it. Returns or raises what `work` does."""
    executor = deep_executor("deep stack")
    try:
        return executor.submit(work).result()
    finally:
        executor.shutdown(wait=False)


def deep_executor(name: str) -> ThreadPoolExecutor:
    """An executor with one thread whose stack has STACK_BYTES. The thread is already started."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    with _lock:  # the stack size applies to every thread that starts in the meantime
        usual = threading.stack_size(STACK_BYTES)
        try:
            executor.submit(int)  # the executor starts its thread only with the first task
        finally:
            threading.stack_size(usual)
    return executor

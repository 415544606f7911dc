"""For compiled code that recurses as deep as its input: what overflows a stack ends the whole process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 128 << 20
"""The deepest chain of rules in the largest grammar takes half of it; 8 MiB are usual. Only pages that are touched
cost memory."""

_lock = threading.Lock()


def in_deep_stack(work: Callable[[], T]) -> T:
    """Do it in a thread with a stack of STACK_BYTES, and wait for that. Answers or raises what it does."""
    executor = deep_executor("deep stack")
    try:
        return executor.submit(work).result()
    finally:
        executor.shutdown(wait=False)


def deep_executor(name: str) -> ThreadPoolExecutor:
    """One thread with a stack of STACK_BYTES that does one thing after the other."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    with _lock:  # the size holds for all threads that start meanwhile
        usual = threading.stack_size(STACK_BYTES)
        try:
            executor.submit(int)  # the thread starts with its first work
        finally:
            threading.stack_size(usual)
    return executor

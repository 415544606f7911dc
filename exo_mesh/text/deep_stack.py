"""For compiled code that recurses as deep as its input: what overflows a stack ends the whole process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 128 << 20
"""The deepest chain of rules in the largest grammar takes half of it; 8 MiB are usual. Only pages that are touched
cost memory."""

_lock = threading.Lock()


def in_deep_stack(work: Callable[[], T]) -> T:
    """Do it in a thread with a stack of STACK_BYTES, and wait for that. Answers or raises what it does."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as exc:  # noqa: BLE001 - it is raised again, in the thread that waits for it
            failed.append(exc)

    thread = start_deep(run, "deep stack")
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def start_deep(run: Callable[[], None], name: str) -> threading.Thread:
    """A started thread with a stack of STACK_BYTES."""
    with _lock:  # the size holds for all threads that start meanwhile
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
        finally:
            threading.stack_size(usual)
    return thread

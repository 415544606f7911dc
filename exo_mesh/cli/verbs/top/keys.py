"""Reads keys of a terminal one at a time, without Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = {"\t": "tab", "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left"}


@contextmanager
def raw_keys() -> Iterator[None]:
    """Makes keys readable at once and without echo; Ctrl-C still interrupts. Restores the terminal at the end."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def wait_for_keys(wake: int, patience_s: float) -> list[str]:
    """Waits patience_s for keys, or until `wake` is readable; returns keys. Raises EOFError if the terminal is gone."""
    descriptor = sys.stdin.fileno()
    ready = select.select([descriptor, wake], [], [], patience_s)[0]
    if wake in ready:
        os.read(wake, 4096)
    if descriptor not in ready:
        return []
    if not (text := os.read(descriptor, 1024).decode(errors="replace")):
        raise EOFError
    return named(text)


def named(text: str) -> list[str]:
    """The name of each key in the text: `up`, `down`, `left`, `right`, `tab`, or the character."""
    keys = []
    text = text.replace("\x1bO", "\x1b[")
    while text:
        length = 3 if text.startswith("\x1b[") else 1
        key, text = text[:length], text[length:]
        keys.append(_NAMES.get(key, key))
    return keys

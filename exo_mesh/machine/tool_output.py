"""Runs a command line tool within a deadline."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

TOOL_DEADLINE_S = 3.0
"""nvidia-smi usually takes 0.1 s, and a second or two if the driver has to wake up first."""


def ask(command: Sequence[str], deadline_s: float = TOOL_DEADLINE_S) -> str:
    """Returns the standard output of a tool; "" if it is missing, fails, or does not end in time."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=deadline_s, check=False, text=True
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""

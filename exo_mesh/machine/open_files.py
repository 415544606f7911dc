"""The limit on files and connections that this process may have open at once."""

from __future__ import annotations

import contextlib
import resource

ENOUGH = 65_536
"""The systemd unit's figure: 1,000 concurrent requests take about 2,000 files."""

STEPS = (ENOUGH, 24_576, 10_240)
"""Limits to try in order. macOS reports no hard limit, but refuses more than kern.maxfilesperproc. OPEN_MAX: 10,240."""


def limit() -> int:
    """Returns the soft limit in force."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> int:
    """Raises the soft limit towards the hard one, to at most ENOUGH; returns the limit in force.

    Shells start programs with 1,024 files on Linux and 256 on macOS.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in STEPS:
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or wanted <= soft:
            break
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
    return limit()

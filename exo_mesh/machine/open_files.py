"""How many files and connections this process may have open at once."""

from __future__ import annotations

import contextlib
import resource

ENOUGH = 65_536
"""The systemd unit's figure: 1,000 requests at once take about 2,000 files."""

STEPS = (ENOUGH, 24_576, 10_240)
"""macOS says that the hard limit is infinite and refuses what is above kern.maxfilesperproc; 10,240 is its OPEN_MAX."""


def limit() -> int:
    """The soft limit in force."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> int:
    """Raise the soft limit towards the hard one, to at most ENOUGH; answers the limit in force.

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

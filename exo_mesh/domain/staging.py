"""Chooses which staged copies of the model store a peer deletes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GRACE_S = 30.0
"""A copy that was used within this time is kept: a plan that needs the copy may not be in the view yet."""


@dataclass(frozen=True, slots=True)
class StagedCopy:
    """A local copy of a model of the store. used_at: seconds of the caller's clock. is_in_use: an instance or a fetch
    needs it. is_orphan: the store's host is reachable and no longer has the model."""

    model: str
    num_bytes: int
    used_at: float
    is_in_use: bool = False
    is_orphan: bool = False


def surplus(copies: Iterable[StagedCopy], keep_bytes: int | None, now: float) -> list[str]:
    """Lists the models whose copies are to be deleted, the most recently used first.

    Idle copies are kept, newest first, as long as together they take at most `keep_bytes`; 0 keeps none, None keeps
    all. Orphans are deleted even if there is room. A copy in use is never deleted, and does not count against
    keep_bytes.
    """
    left = keep_bytes
    found = []
    for copy in sorted(copies, key=lambda one: (-one.used_at, one.model)):
        if copy.is_in_use:
            continue
        if copy.is_orphan:
            found.append(copy.model)
        elif left is None or copy.num_bytes <= left:
            left = None if left is None else left - copy.num_bytes
        elif now - copy.used_at >= GRACE_S:
            found.append(copy.model)
    return found

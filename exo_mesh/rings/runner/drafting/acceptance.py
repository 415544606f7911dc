"""How often guesses are right: of one request, and of all requests before. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right

KINDS = (1, 4, 8, 16, 32)
"""Guesses are counted by how many tokens before them were found again; the first kind is of drafters that do not
search."""

FIRST = (0.5, 0.2, 0.4, 0.6, 0.8, 0.9)
"""Share of right guesses of each kind that is assumed while nothing has been judged. Too small rather than too large:
guesses that are not sent are judged as well."""

WEIGHT = 4.0
"""What is assumed counts as so many guesses."""

DOUBT = 0.5
"""Standard errors by which a share is taken to be smaller than measured: of several ways to draft, the one whose share
was overestimated most would be chosen otherwise."""

FADES_OWN, FADES = 0.98, 0.995
"""A guess counts so much less with each later one: 50 of a request, 200 of all requests decide."""


def kind_of(matched: int) -> int:
    """The kind of a guess behind so many matched tokens."""
    return bisect_right(KINDS, matched)


class Acceptance:
    """Share of right guesses by kind. parent: of all requests; guesses of this one count there, too."""

    def __init__(self, parent: Acceptance | None = None) -> None:
        self._parent = parent
        self._fades = FADES if parent is None else FADES_OWN
        self._right = [0.0] * len(FIRST)
        self._all = [0.0] * len(FIRST)

    def note(self, kind: int, *, is_right: bool) -> None:
        self._right[kind] = self._fades * self._right[kind] + is_right
        self._all[kind] = self._fades * self._all[kind] + 1
        if self._parent is not None:
            self._parent.note(kind, is_right=is_right)

    def share(self, kind: int) -> float:
        """The share of right guesses of a kind, from 0 to 1, less DOUBT."""
        share, count = self._mean(kind), self._all[kind] + WEIGHT
        return max(0.0, share - DOUBT * math.sqrt(share * (1 - share) / count))

    def _mean(self, kind: int) -> float:
        assumed = FIRST[kind] if self._parent is None else self._parent._mean(kind)
        return (self._right[kind] + WEIGHT * assumed) / (self._all[kind] + WEIGHT)

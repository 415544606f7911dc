"""Suggests the known word that a misspelt one may stand for."""

from __future__ import annotations

from collections.abc import Iterable

from exo_mesh.settings.setting import PREFIX

MIN_CHARS = 3
"""Shorter words are one edit from too many others."""
LONG_CHARS = 9
"""A word of this length may have two typing errors, a shorter one has one."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known word that differs by a typing error or continues the word; "" if none does."""
    near = near_word(word, known)
    return f"; did you mean {near}?" if near else ""


def near_word(word: str, known: Iterable[str]) -> str:
    """The known word that differs by a typing error or continues the word; "" if none does."""
    wanted = _bare(word)
    if len(wanted) < MIN_CHARS:
        return ""
    most = 2 if len(wanted) >= LONG_CHARS else 1
    near = [(_distance(wanted, bare, most), len(bare), name) for name in known if (bare := _bare(name))]
    distance, _, name = min(near, default=(most + 1, 0, ""))
    return name if distance <= most else ""


def _bare(word: str) -> str:
    """A name without what all names of its kind have: flags their dashes, variables their prefix."""
    return word.upper().replace("-", "_").strip("_").removeprefix(PREFIX).lstrip("/")


def _distance(word: str, other: str, most: int) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours from one word to the other; `most` if the other
    word continues the first, and more than `most` if it is farther away."""
    if other.startswith(word):
        return min(most, len(other) - len(word))
    if abs(len(word) - len(other)) > most:
        return most + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(word, 1):
        before, last, row = row, before, [i]
        for j, wanted in enumerate(other, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != wanted)))
            if i > 1 and j > 1 and (letter, word[i - 2]) == (other[j - 2], wanted):
                row[-1] = min(row[-1], last[j - 2] + 1)
    return row[-1]

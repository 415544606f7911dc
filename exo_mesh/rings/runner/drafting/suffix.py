"""Drafts what came after the same tokens before: in the prompt, in the output, or in an expected answer. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice

LEAST_MATCH = 3
"""Tokens that must be equal before a continuation is worth a guess; the index is by so many."""

MOST_MATCH = 32
"""Tokens that are compared; a longer match is no better."""

MOST_PLACES = 16
"""Earlier places that are compared, the newest first."""

AT_ONCE = 1000
"""Tokens that one call adds to the index: less than a millisecond."""

MOST_SLOTS = 1 << 20
"""Most entries of the table by hash: 4 MB. Longer texts share them."""

_PRIMES = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D


class SuffixIndex:
    """Finds earlier places of the last tokens, in a list of tokens that grows at its end.

    The table by hash has the newest place of three tokens, and each place the one before it, as in the chains of
    deflate (RFC 1951, section 4): at most 12 bytes a token.
    """

    def __init__(self, num_expected: int) -> None:
        """num_expected: about how many tokens the list will have."""
        slots = 1 << max(8, min(num_expected, MOST_SLOTS).bit_length())
        self._mask = slots - 1
        self._newest = array("i", [0]) * slots
        self._before = array("i", [0]) * LEAST_MATCH
        """By the position behind three tokens, the position behind the same three tokens before that; 0: none."""

    @property
    def num_bytes(self) -> int:
        return self._newest.itemsize * (len(self._newest) + len(self._before))

    def grow(self, tokens: Sequence[int]) -> bool:
        """Add up to AT_ONCE of the tokens that are new; False if some are left."""
        newest, before, mask = self._newest, self._before, self._mask
        p, q, r = _PRIMES
        start = len(before)
        stop = min(len(tokens) + 1, start + AT_ONCE)
        for at in range(start, stop):
            mixed = tokens[at - 3] * p ^ tokens[at - 2] * q ^ tokens[at - 1] * r
            key = (mixed ^ mixed >> 17) & mask
            before.append(newest[key])
            newest[key] = at
        return stop > len(tokens)

    def find(self, tokens: Sequence[int], text: Sequence[int]) -> tuple[int, int]:
        """The position in `tokens`, the list of the index, behind the longest match with the end of `text`, and the
        length of the match; 0, 0 if there is none. A match that is the end itself does not count."""
        if len(text) < LEAST_MATCH:
            return 0, 0
        p, q, r = _PRIMES
        mixed = text[-3] * p ^ text[-2] * q ^ text[-1] * r
        at = self._newest[(mixed ^ mixed >> 17) & self._mask]
        best, longest = 0, LEAST_MATCH - 1
        most = min(MOST_MATCH, len(text))
        for _ in range(MOST_PLACES):
            if not at:
                break
            if at < len(tokens):
                length = 0
                while length < most and length < at and tokens[at - 1 - length] == text[-1 - length]:
                    length += 1
                if length > longest:
                    best, longest = at, length
                    if length == most:
                        break
            at = self._before[at]
        return (best, longest) if best else (0, 0)


class SuffixDrafter:
    """Drafts for one sequence. expected: an answer that the client expects, which the output may follow."""

    def __init__(self, num_expected: int, expected: Sequence[int] = ()) -> None:
        self._index = SuffixIndex(num_expected)
        self._expected = expected
        self._of_expected = SuffixIndex(len(expected)) if expected else None
        self._begins = bool(expected)

    def draft(self, tokens: Sequence[int], ahead: Sequence[int], most: int) -> tuple[list[int], int]:
        """Up to `most` tokens that may come after `tokens` and `ahead`, and how many tokens before them were found
        again; an empty list if nothing is known. ahead: the drafts that have been sent."""
        self._index.grow(tokens)
        at, matched = self._index.find(tokens, tokens)
        source = tokens
        if self._of_expected is not None:
            self._of_expected.grow(self._expected)
            there, length = self._of_expected.find(self._expected, tokens)
            if length >= max(matched, LEAST_MATCH):
                at, matched, source = there, length, self._expected
            elif self._begins and not matched:
                at, matched, source = 0, MOST_MATCH, self._expected
        self._begins = False
        if not matched:
            return [], 0
        wanted = len(ahead) + most
        found = list(islice(source, at, at + wanted))
        if source is tokens:  # a text that repeats itself goes on so
            period = len(tokens) - at
            while len(found) < wanted:
                found.append(found[-period])
        if found[: len(ahead)] != list(ahead):
            return [], 0
        return found[len(ahead) :], matched

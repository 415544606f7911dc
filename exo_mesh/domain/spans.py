"""Sets of bytes of one file, as half-open spans `(start, stop)`: sorted, separate and not empty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

Span = tuple[int, int]
Spans = tuple[Span, ...]

Digests = tuple[tuple[int, int, str], ...]
"""The SHA-256 of pieces of a file, in hex: (start, stop, digest)."""

Pieces = Mapping[str, Spans]
"""Bytes of several files of one model, by file name."""


def merged(spans: Iterable[Span]) -> Spans:
    """Merges spans in any order; spans that overlap or touch become one."""
    found: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def joined(spans: Spans, gap: int) -> Spans:
    """Joins neighbouring spans that are at most `gap` bytes apart, the bytes between them included."""
    found: list[Span] = []
    for start, stop in spans:
        if found and start - found[-1][1] <= gap:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def minus(spans: Spans, others: Spans) -> Spans:
    """The bytes of `spans` that are not in `others`."""
    found: list[Span] = []
    for start, stop in spans:
        for other_start, other_stop in others:
            if other_stop <= start or stop <= other_start:
                continue
            if start < other_start:
                found.append((start, other_start))
            start = max(start, other_stop)
        if start < stop:
            found.append((start, stop))
    return tuple(found)


def common(spans: Spans, others: Spans) -> Spans:
    """Returns the bytes that are in both."""
    return minus(spans, minus(spans, others))


def num_bytes(spans: Iterable[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def covers(spans: Spans, wanted: Spans) -> bool:
    """Checks whether all bytes of `wanted` are in `spans`."""
    return not minus(wanted, spans)


def cut_at(spans: Spans, edges: Iterable[int]) -> Spans:
    """Cuts the spans at these positions."""
    ordered = sorted(set(edges))
    return tuple(
        (begin, end)
        for start, stop in spans
        for begin, end in pairwise([start, *(edge for edge in ordered if start < edge < stop), stop])
    )


def cut(spans: Spans, most: int) -> Spans:
    """Cuts the spans into spans of at most `most` bytes, which may touch each other."""
    return tuple((begin, min(begin + most, stop)) for start, stop in spans for begin in range(start, stop, most))

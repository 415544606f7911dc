"""Sets of bytes behave as sets of numbers do."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.domain.spans import Span, common, covers, cut, joined, merged, minus, num_bytes

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def numbers(spans: tuple[Span, ...]) -> set[int]:
    return {number for start, stop in spans for number in range(start, stop)}


@given(SPANS, SPANS)
def test_spans_are_sets(some: list[Span], others: list[Span]) -> None:
    one, other = merged(some), merged(others)
    assert numbers(one) == numbers(tuple(some))
    assert all(stop < start for (_, stop), (start, _) in pairwise(one)), "sorted and apart"
    assert numbers(minus(one, other)) == numbers(one) - numbers(other)
    assert numbers(common(one, other)) == numbers(one) & numbers(other)
    assert covers(one, other) == (numbers(other) <= numbers(one))
    assert num_bytes(one) == len(numbers(one))


@given(SPANS, st.integers(1, 9))
def test_what_is_cut_is_the_same_in_smaller_spans(some: list[Span], most: int) -> None:
    pieces = cut(merged(some), most)
    assert numbers(pieces) == numbers(tuple(some)) and all(0 < stop - start <= most for start, stop in pieces)


@given(SPANS, st.integers(0, 9))
def test_joined_spans_have_the_same_bytes_and_only_short_gaps_between_them(some: list[Span], gap: int) -> None:
    spans = merged(some)
    found = joined(spans, gap)
    assert covers(found, spans) and all(start - stop > gap for (_, stop), (start, _) in pairwise(found))
    assert all(stop - start <= gap for start, stop in minus(found, spans))

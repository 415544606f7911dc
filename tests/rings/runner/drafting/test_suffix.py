"""The index of suffixes finds what came after the same tokens before, in little memory."""

from __future__ import annotations

import random

import pytest

from exo_mesh.rings.runner.drafting.suffix import AT_ONCE, LEAST_MATCH, MOST_MATCH, SuffixDrafter, SuffixIndex


def drafted(tokens: list[int], most: int = 8, ahead: tuple[int, ...] = (), expected: tuple[int, ...] = ()) -> list[int]:
    drafter = SuffixDrafter(len(tokens), expected)
    while not drafter._index.grow(tokens):
        pass
    return drafter.draft(tokens, ahead, most)[0]


def test_what_followed_the_longest_match_comes_again() -> None:
    text = [1, 2, 3, 4, 50, 51, 52, 9, 2, 3, 4, 60, 61, 62, 1, 2, 3, 4]
    assert drafted(text, 3) == [50, 51, 52], "1 2 3 4 is longer than 2 3 4, which is newer"
    assert drafted([7, 1, 2, 3, 10, 8, 1, 2, 3, 20, 9, 1, 2, 3], 1) == [20], "of equal matches the newest counts"
    assert drafted([1, 2, 3, 4, 5]) == []
    assert drafted([1, 2]) == []


def test_a_text_that_repeats_itself_goes_on() -> None:
    assert drafted([5, 6, 7, 5, 6, 7], 7) == [5, 6, 7, 5, 6, 7, 5]


def test_drafts_on_their_way_are_continued_and_others_given_up() -> None:
    text = [*range(100, 120), 1, *range(100, 105)]
    assert drafted(text, 3) == [105, 106, 107]
    assert drafted(text, 3, ahead=(105, 106)) == [107, 108, 109]
    assert drafted(text, 3, ahead=(105, 99)) == []


def test_an_expected_answer_is_followed_from_its_beginning_and_found_again_after_a_change() -> None:
    expected = tuple(range(200, 240))
    drafter = SuffixDrafter(50, expected)
    prompt = [1, 2, 3, 4]
    assert drafter.draft(prompt, (), 5) == (list(expected[:5]), MOST_MATCH)
    said = [*prompt, 200, 201, 202, 7]
    assert drafter.draft(said, (), 5)[0] == [], "one word is changed"
    assert drafter.draft([*said, 204, 205, 206], (), 3)[0] == [207, 208, 209]


@pytest.mark.parametrize("seed", range(20))
def test_the_continuation_is_that_of_some_earlier_place(seed: int) -> None:
    chance = random.Random(seed)
    tokens = [chance.randrange(4) for _ in range(200)]
    drafter = SuffixDrafter(len(tokens))
    drafter._index.grow(tokens)
    found, matched = drafter.draft(tokens, (), 4)
    has_come = any(tokens[at - LEAST_MATCH : at] == tokens[-LEAST_MATCH:] for at in range(LEAST_MATCH, len(tokens)))
    assert (matched >= LEAST_MATCH) == has_come
    places = [at for at in range(LEAST_MATCH, len(tokens)) if tokens[at - matched : at] == tokens[-matched:]]
    assert not has_come or any((tokens[at:] + tokens[at:] * 4)[:4] == found for at in places)


def test_an_index_takes_little_memory_and_grows_in_pieces() -> None:
    chance = random.Random(1)
    tokens = [chance.randrange(150_000) for _ in range(10 * AT_ONCE)]
    index = SuffixIndex(len(tokens))
    calls = 1
    while not index.grow(tokens):
        calls += 1
    assert calls == 10 and index.grow(tokens)
    assert index.num_bytes <= 16 * len(tokens)

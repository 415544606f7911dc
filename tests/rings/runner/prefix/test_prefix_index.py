"""The index finds what a comparison with every known sequence finds, and forgets all of what is removed."""

from __future__ import annotations

import random
from itertools import takewhile

import pytest

from exo_mesh.rings.runner.prefix.index import BLOCK_TOKENS, PrefixIndex, common_tokens, content_of


def common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def a_prompt(rng: random.Random, known: list[list[int]]) -> list[int]:
    base = rng.choice(known) if known and rng.random() < 0.8 else []
    kept = base[: rng.randrange(len(base) + 1)]
    return kept + [rng.randrange(3) for _ in range(rng.randrange(64, 300))]


def blocks_of(tokens: list[int]) -> list[bytes]:
    """Each whole block, with all that is before it."""
    return [content_of(tokens[:stop]) for stop in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)]


@pytest.mark.parametrize("seed", range(5))
def test_the_closest_sequences_are_those_with_the_most_blocks_in_common(seed: int) -> None:
    rng, index, held = random.Random(seed), PrefixIndex(), dict[int, list[int]]()
    for number in range(50):
        if held and rng.random() < 0.3:
            gone = rng.choice(list(held))
            del held[gone]
            index.remove(gone)
            index.remove(gone)  # an unknown one changes nothing
        else:
            held[number] = a_prompt(rng, list(held.values()))
            index.add(number, content_of(held[number]))
        asked = a_prompt(rng, list(held.values()))
        blocks = {one: common(tokens, asked) // BLOCK_TOKENS for one, tokens in held.items()}
        most = max(blocks.values(), default=0)
        match = index.match(content_of(asked))
        assert match.blocks == most
        assert set(match.closest) == ({one for one, count in blocks.items() if count == most} if most else set())
        ends = {one for one, tokens in held.items() if 0 < len(tokens) // BLOCK_TOKENS == blocks[one]}
        assert set(match.on_the_way) == ends
        lengths = [len(held[one]) // BLOCK_TOKENS for one in match.on_the_way]
        assert lengths == sorted(lengths), "the longest last"
        assert index.num_blocks == len({block for tokens in held.values() for block in blocks_of(tokens)})
        for one, tokens in held.items():
            others = {block for two, other in held.items() if two != one for block in blocks_of(other)}
            assert index.blocks_alone(one) == sum(block not in others for block in blocks_of(tokens))
    for one in list(held):
        index.remove(one)
    assert (index.num_blocks, len(index), index._root.children) == (0, 0, {})


def test_common_tokens_are_counted_one_by_one() -> None:
    one = content_of([1, 2, 3, 4, 5])
    assert common_tokens(one, content_of([1, 2, 9, 4])) == 2
    assert common_tokens(one, content_of([1, 2, 3]), 2) == 3
    assert common_tokens(one, one) == 5
    assert common_tokens(one, b"") == 0


def test_less_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="63 tokens are no block"):
        PrefixIndex().add(1, content_of(range(63)))

"""The digest of a driver tells an entry peer how much of a prompt is kept, without its tokens."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from exo_mesh.domain.images import PictureSpec
from exo_mesh.domain.routing.digest import (
    BLOCK_TOKENS,
    MAX_BYTES,
    is_digest,
    kept_tokens,
    prompt_hashes,
    sampled_counts,
    shortened,
)
from exo_mesh.rings.runner.prefix import digest as making
from exo_mesh.rings.runner.prefix.cache import PrefixCache
from exo_mesh.rings.runner.prefix.digest import EVERY_S, DigestMaker
from exo_mesh.rings.runner.prefix.index import BLOCK_TOKENS as INDEX_BLOCK_TOKENS
from exo_mesh.rings.runner.scheduling.sequence import Sequence

SALT = b"pepper!!"
RNG = random.Random(3)


def tokens(count: int) -> list[int]:
    return [RNG.randrange(50_000) for _ in range(count)]


def keep(cache: PrefixCache, number: int, content: list[int], now: float = 0.0, **changes: object) -> Sequence:
    """Let a sequence with this content end."""
    sequence = Sequence(number, [*content, 1], computed=len(content), **changes)  # type: ignore[arg-type]
    cache.ended(sequence, now)
    return sequence


def a_digest(cache: PrefixCache) -> bytes:
    return DigestMaker(cache, SALT).make(0.0)


def test_blocks_are_those_of_the_cache() -> None:
    assert BLOCK_TOKENS == INDEX_BLOCK_TOKENS


def test_all_of_a_kept_prompt_is_found_and_of_a_part_two_thirds() -> None:
    cache, prompt = PrefixCache(1), tokens(64 * 40 + 9)
    keep(cache, 1, prompt)
    digest = a_digest(cache)
    assert is_digest(digest)
    assert kept_tokens(digest, prompt_hashes([*prompt, 1, 2])) == 64 * 40
    for shared in range(1, 40):
        found = kept_tokens(digest, prompt_hashes([*prompt[: 64 * shared], *tokens(200)]))
        assert 2 / 3 * 64 * shared <= found <= 64 * shared
    assert kept_tokens(digest, prompt_hashes(tokens(640))) == 0
    assert kept_tokens(digest, prompt_hashes(prompt[:63])) == 0
    assert kept_tokens(b"", prompt_hashes(prompt)) == 0


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 8, 250, 65_535])
def test_the_hashed_places_grow_with_the_logarithm(num_blocks: int) -> None:
    counts = sampled_counts(num_blocks)
    assert counts[0] == 1 and counts[-1] == num_blocks and counts == sorted(set(counts))
    assert all(larger <= 1.5 * smaller + 1 for smaller, larger in pairwise(counts))
    assert len(counts) <= 2 * num_blocks.bit_length() + 1


def test_where_kv_cannot_be_cut_back_only_whole_sequences_count() -> None:
    cache, prompt = PrefixCache(1, cuts_back=False), tokens(64 * 6)
    keep(cache, 1, prompt)
    digest = a_digest(cache)
    assert kept_tokens(digest, prompt_hashes([*prompt, 5])) == 64 * 6
    assert kept_tokens(digest, prompt_hashes(prompt[: 64 * 5])) == 0


def test_what_has_a_scope_of_its_own_or_stores_nothing_is_not_in_it() -> None:
    cache, prompts = PrefixCache(1), [tokens(200) for _ in range(3)]
    keep(cache, 1, prompts[0], cache_scope=b"session")
    keep(cache, 2, prompts[1], is_kept=False)
    assert a_digest(cache) == b""
    keep(cache, 3, prompts[2])
    digest = a_digest(cache)
    found = [kept_tokens(digest, prompt_hashes(one)) for one in prompts]
    assert found == [0, 0, 192]
    assert kept_tokens(digest, prompt_hashes(prompts[0], b"session")) == 0
    assert kept_tokens(digest, prompt_hashes(prompts[2], b"session")) == 0, "a session uses nothing else"


def test_what_only_some_stages_hold_is_not_in_it() -> None:
    cache, prompt = PrefixCache(3), tokens(200)
    keep(cache, 1, prompt)
    cache.change(3, 2, ())
    assert cache.held == (1,) and a_digest(cache) == b""


def test_a_full_cache_has_a_short_digest_with_the_newest_first() -> None:
    cache, prompts = PrefixCache(1), [tokens(64 * 8) for _ in range(600)]
    for number, prompt in enumerate(prompts):
        keep(cache, number + 1, prompt, float(number))
    maker = DigestMaker(cache, SALT)
    for turn in range(10):
        digest = maker.make(turn * EVERY_S)
    assert len(digest) == MAX_BYTES
    found = [kept_tokens(digest, prompt_hashes(prompt)) for prompt in prompts]
    assert found[-80:] == [512] * 80 and set(found[:400]) == {0}
    short = shortened(digest, 200)
    assert is_digest(short) and len(short) <= 200
    assert [kept_tokens(short, prompt_hashes(prompt)) for prompt in prompts[-30:]] == [512] * 30
    assert shortened(digest, 9) == b""


def test_an_evicted_sequence_leaves_the_digest_and_one_that_is_used_comes_first() -> None:
    cache, prompts = PrefixCache(1), [tokens(200) for _ in range(2)]
    for number, prompt in enumerate(prompts):
        keep(cache, number + 1, prompt, float(number))
    maker = DigestMaker(cache, SALT)
    assert len(maker.make(1.0)) == 8 + 6 * 6
    cache.make_room(0, 250, 0, 0, 2.0)
    assert len(cache.held) == 1
    (left,) = (prompt for prompt, number in zip(prompts, (1, 2), strict=True) if number in cache.held)
    digest = maker.make(3.0)
    assert [kept_tokens(digest, prompt_hashes(prompt)) for prompt in prompts] == [
        192 * (one is left) for one in prompts
    ]


def test_a_digest_is_due_only_when_something_changed_and_not_too_often() -> None:
    cache, maker = (cache := PrefixCache(1)), DigestMaker(cache, SALT)
    assert not maker.is_due(0.0)
    keep(cache, 1, tokens(100))
    assert maker.is_due(0.0)
    maker.make(0.0)
    assert not maker.is_due(100.0)
    keep(cache, 2, tokens(100))
    assert not maker.is_due(EVERY_S / 2) and maker.is_due(EVERY_S)


def test_long_sequences_are_hashed_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "MOST_HASHED_BYTES", 1000)
    cache, prompts = PrefixCache(1), [tokens(200) for _ in range(3)]
    for number, prompt in enumerate(prompts):
        keep(cache, number + 1, prompt, float(number))
    maker = DigestMaker(cache, SALT)
    for turn in range(1, 4):
        assert maker.is_due(turn * EVERY_S)
        digest = maker.make(turn * EVERY_S)
        assert sum(kept_tokens(digest, prompt_hashes(prompt)) == 192 for prompt in prompts) == turn
    assert not maker.is_due(100.0)


def test_an_image_counts_by_what_it_shows() -> None:
    def a_picture(shown: str) -> PictureSpec:
        return PictureSpec(10, 30, 5, 6, 70, 84, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), shown * 64)

    cache, prompt = PrefixCache(1), tokens(200)
    keep(cache, 1, prompt, pictures=(a_picture("a"),))
    digest = a_digest(cache)
    assert kept_tokens(digest, prompt_hashes(prompt, b"", [a_picture("a")])) == 192
    assert kept_tokens(digest, prompt_hashes(prompt, b"", [a_picture("b")])) == 0
    assert kept_tokens(digest, prompt_hashes(prompt)) == 0


def test_the_digests_of_two_drivers_have_nothing_in_common() -> None:
    cache = PrefixCache(1)
    keep(cache, 1, tokens(64 * 20))
    one, other = DigestMaker(cache, SALT).make(0.0), DigestMaker(cache, b"another!").make(0.0)
    entries = [{digest[at : at + 6] for at in range(8, len(digest), 6)} for digest in (one, other)]
    assert len(entries[0]) > 8 and not entries[0] & entries[1]

"""All stages of a ring use the same beginning of a prompt: what one stage has lost shortens it for all, and a machine
that is short of memory makes all of them give up what they keep."""

from __future__ import annotations

import pytest

from exo_mesh.domain.frame import NO_COPY
from exo_mesh.rings.runner.prefix.cache import PrefixCache
from tests.rings.runner.prefix.random_ring import CachingRing
from tests.rings.runner.prefix.test_prefix_ring import PROMPT, answer, counts, keeping, recurrent
from tests.rings.runner.test_stage_and_driver import expected
from tests.support.serving import ServingRing

NUM_STAGES = 3


@pytest.mark.parametrize("loser", range(NUM_STAGES))
async def test_what_one_stage_has_lost_shortens_the_reuse_to_what_all_have(loser: int) -> None:
    ring = CachingRing(NUM_STAGES, keeping)
    short, long = [*PROMPT[:150], *[9] * 20], [*PROMPT[:190], *[8] * 20]
    for name, prompt in (("short", short), ("long", long)):
        await answer(ring, name, prompt)
    counts(ring)
    lost = max(ring.cache.held)
    ring.engines[loser].remove(lost)
    caller = ring.submit("again", PROMPT, 8)
    ring.run()
    events = await caller.collect()
    assert [event.token_id for event in events] == expected(PROMPT, 8, NUM_STAGES)
    assert ring.cache.hits == 3, "150 tokens for the long one, 190 that a stage had lost, and 150 instead"
    assert events[0].cached == 150
    made = counts(ring)
    assert max(made) <= (len(PROMPT) - 1 - 150) + 8 + (len(PROMPT) - 190), "and a chunk that was on its way"
    assert lost not in ring.cache.held and all(lost not in engine.sequences() for engine in ring.engines)
    ring.check()


@pytest.mark.parametrize("make", [keeping, recurrent])
@pytest.mark.parametrize("loser", range(NUM_STAGES))
async def test_a_stage_that_has_lost_its_cache_reports_it_and_the_request_is_right(make: object, loser: int) -> None:
    ring = CachingRing(NUM_STAGES, make, cuts_back=make is keeping)  # type: ignore[arg-type]
    await answer(ring, "a", PROMPT)
    faults = []
    returned = ring.driver.returned

    def note(frame: object, *args: object, **kwargs: object) -> None:
        faults.extend(frame.faults)  # type: ignore[attr-defined]
        returned(frame, *args, **kwargs)  # type: ignore[arg-type]

    ring.driver.returned = note  # type: ignore[method-assign]
    for sequence in ring.engines[loser].sequences():
        ring.engines[loser].remove(sequence)
        ring.tampered.add(sequence)
    for name in ("b", "c"):
        assert await answer(ring, name, PROMPT) == expected(PROMPT, 8, NUM_STAGES)
    assert {fault.stage for fault in faults} == {loser} and faults[0].code == NO_COPY
    counts(ring)
    assert await answer(ring, "d", PROMPT) == expected(PROMPT, 8, NUM_STAGES)
    assert counts(ring) == [8] * NUM_STAGES, "all of them have it again"
    ring.check()


@pytest.mark.parametrize("short", range(NUM_STAGES))
@pytest.mark.parametrize("level", [1, 2])
def test_one_machine_that_is_short_of_memory_empties_the_cache_of_all(short: int, level: int) -> None:
    engines = CachingRing(NUM_STAGES, keeping).engines
    cache = PrefixCache(NUM_STAGES)
    ring = ServingRing(engines, computing_s=[1e-4] * NUM_STAGES, prefix=cache)
    for number in range(2):
        ring.submit((number + 3, *PROMPT), 3)
        ring.run()
    assert len(cache.held) == 2 and all(set(engine.sequences()) == set(cache.held) for engine in engines)
    before = set(cache.held)
    ring.pressure_of[short] = level
    ring.submit((7, 8, 9), 30)
    ring.run()
    left = 1 if level == 1 else 0
    assert len(before.intersection(cache.held)) == left, "level 1: one at a time"
    assert all(set(engine.sequences()) == set(cache.held) for engine in engines), "the same ones everywhere"
    assert not ring.driver.evictions

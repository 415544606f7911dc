"""A driver with a prefix cache gives every request the answer that it gets alone, and computes little twice."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

from exo_mesh.domain.frame import Fault, Frame, Keep, UnknownOp
from exo_mesh.engine.contract import StageInput, StageOutput, copy_defect
from exo_mesh.errors import EngineError
from exo_mesh.rings.runner.prefix.cache import LEAST_COMMON, MOST_COPIED
from exo_mesh.rings.runner.prefix.index import BLOCK_TOKENS
from exo_mesh.rings.runner.stage import Stage, StageResult
from tests.rings.runner.prefix.random_ring import CachingRing, Schedule
from tests.rings.runner.test_change_of_plan import CountingEngine
from tests.rings.runner.test_stage_and_driver import VOCAB, expected, ids

PROMPT = [3 + (7 * i) % 40 for i in range(200)]


class KeepingEngine(CountingEngine):
    """Copies sequences, with KV that can be cut back."""

    cuts_back = True

    def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
        held = self.kv.get(source)
        defect = copy_defect(source, None if held is None else len(held), upto, max_tokens)
        if defect is None and held is not None and len(held) != upto and not self.cuts_back:
            defect = "it cannot be cut back"
        if defect or held is None:
            raise EngineError(defect)
        self.kv[sequence] = held[:upto]


class RecurrentEngine(KeepingEngine):
    """Its KV cannot be cut back, like a recurrent state."""

    cuts_back = False

    def forward(self, stage_input: StageInput) -> StageOutput:
        for row in stage_input.rows:
            if 0 < row.pos0 < len(self.kv.get(row.sequence, ())):
                return StageOutput(faults=(Fault(row.sequence, 0, "bad_row", "it cannot be cut back"),))
        return super().forward(stage_input)


def keeping(index: int, num_stages: int) -> KeepingEngine:
    return KeepingEngine(index == 0, index == num_stages - 1)


def recurrent(index: int, num_stages: int) -> KeepingEngine:
    return RecurrentEngine(index == 0, index == num_stages - 1)


def counts(ring: CachingRing) -> list[int]:
    made = [engine.computed for engine in ring.engines]  # type: ignore[attr-defined]
    for engine in ring.engines:
        engine.computed = 0  # type: ignore[attr-defined]
    return made


async def answer(ring: CachingRing, name: str, prompt: Sequence[int], tokens: int = 8, **changes: object) -> list[int]:
    caller = ring.submit(name, prompt, tokens, **changes)
    ring.run()
    return ids(await caller.collect())


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("common", [LEAST_COMMON - 1, LEAST_COMMON, 30, BLOCK_TOKENS])
async def test_prompts_shorter_than_a_block_share_their_beginning(num_stages: int, common: int) -> None:
    ring = CachingRing(num_stages, keeping)
    one, other = [*PROMPT[:common], *[1] * 7], [*PROMPT[:common], *[2] * 9]
    assert await answer(ring, "a", one) == expected(one, 8, num_stages)
    counts(ring)
    assert await answer(ring, "b", other) == expected(other, 8, num_stages)
    shared = common if common >= LEAST_COMMON else 0
    assert counts(ring) == [len(other) - shared + 7] * num_stages
    ring.check()


async def test_a_short_prompt_is_found_again_among_others_that_begin_like_it() -> None:
    ring = CachingRing(1, keeping)
    prompts = [[*PROMPT[:24], *[number] * 16] for number in range(20)]
    for number, prompt in enumerate(prompts):
        await answer(ring, f"first-{number}", prompt, 4)
    counts(ring)
    assert await answer(ring, "again", prompts[0], 4) == expected(prompts[0], 4, 1)
    assert counts(ring) == [4], "the last token of the prompt, and three of the answer"
    ring.check()


async def test_a_few_tokens_are_computed_rather_than_copied_from_a_very_long_sequence() -> None:
    ring = CachingRing(1, keeping)
    long = [*PROMPT[:20], *([7] * MOST_COPIED * 20)]
    await answer(ring, "a", long, 1)
    counts(ring)
    other = [*PROMPT[:20], 1, 2, 3]
    assert await answer(ring, "b", other, 1) == expected(other, 1, 1)
    assert counts(ring) == [len(other)]


@pytest.mark.parametrize("make", [keeping, recurrent])
@pytest.mark.parametrize("num_stages", [1, 3])
async def test_a_repeated_prompt_is_not_computed_again(make: object, num_stages: int) -> None:
    ring = CachingRing(num_stages, make, cuts_back=make is keeping)  # type: ignore[arg-type]
    assert await answer(ring, "a", PROMPT) == expected(PROMPT, 8, num_stages)
    counts(ring)
    assert await answer(ring, "b", PROMPT) == expected(PROMPT, 8, num_stages)
    assert counts(ring) == [8] * num_stages, "only the last token of the prompt, and seven of the answer"
    ring.check()


@pytest.mark.parametrize("make", [keeping, recurrent])
async def test_the_next_turn_of_a_chat_computes_only_what_is_new(make: object) -> None:
    ring, talk, new = CachingRing(2, make, cuts_back=make is keeping), list(PROMPT), len(PROMPT)  # type: ignore[arg-type]
    for turn in range(20):
        reply = await answer(ring, f"t{turn}", talk, 6)
        assert reply == expected(talk, 6, 2)
        talk += [*reply, 5, 6, 7, 8]
        new += 10
    assert max(counts(ring)) <= 1.1 * new
    assert ring.cache.hits == 19


async def test_a_prompt_that_parts_from_a_known_one_shares_its_beginning() -> None:
    ring = CachingRing(2, keeping)
    await answer(ring, "a", PROMPT)
    counts(ring)
    other = [*PROMPT[:150], *[9] * 30]
    assert await answer(ring, "b", other) == expected(other, 8, 2)
    assert counts(ring) == [30 + 7] * 2, "all that is new, token by token"


async def test_without_cutting_back_a_snapshot_is_made_where_prompts_part() -> None:
    ring = CachingRing(2, recurrent, cuts_back=False)
    await answer(ring, "a", PROMPT)
    for number in range(3):
        counts(ring)
        other = [*PROMPT[:150], *[9 + number] * 30]
        assert await answer(ring, f"b{number}", other) == expected(other, 8, 2)
    assert counts(ring) == [180 - 128 + 7] * 2, "the second that parts there has left a snapshot at a block's edge"


async def test_a_running_request_gives_its_prompt_to_others() -> None:
    ring = CachingRing(2, keeping)
    first = ring.submit("a", PROMPT, 12)
    ring.lap()
    ring.lap()
    second = ring.submit("b", [*PROMPT, 4, 4], 12)
    ring.run()
    assert ids(await first.collect()) == expected(PROMPT, 12, 2)
    assert ids(await second.collect()) == expected([*PROMPT, 4, 4], 12, 2)
    assert counts(ring) == [200 + 11 + 2 + 11] * 2


async def test_kept_sequences_give_way_before_a_running_one() -> None:
    ring = CachingRing(2, keeping, max_tokens=500)
    for start in range(4):
        prompt = [start + 3, *PROMPT]
        assert await answer(ring, f"a{start}", prompt) == expected(prompt, 8, 2)
        ring.check()
    assert ring.cache.evictions == 2, "three of four would be more than the pool"
    assert await answer(ring, "long", PROMPT * 2, 60) == expected(PROMPT * 2, 60, 2)
    assert not ring.driver.evictions
    ring.check()


async def test_prompts_that_were_asked_often_do_not_keep_new_ones_out() -> None:
    ring = CachingRing(2, keeping, max_tokens=900)
    for number in [0, 1, 2, 3] * 5:
        await answer(ring, f"old{number}", [number + 3, *PROMPT])
    for number in [4, 5, 6]:
        await answer(ring, f"new{number}", [number + 3, *PROMPT])
    hits = ring.cache.hits
    for number in [4, 5, 6]:
        await answer(ring, f"again{number}", [number + 3, *PROMPT])
    assert ring.cache.hits == hits + 3
    ring.check()


async def test_one_conversation_alone_never_loses_its_own_prefix() -> None:
    ring, talk = CachingRing(1, keeping, max_tokens=400), list(PROMPT)
    for turn in range(9):
        counts(ring)
        reply = await answer(ring, f"t{turn}", talk, 6)
        assert counts(ring)[0] <= 20 or not turn
        talk += [*reply, *range(5, 17)]


async def test_the_next_turn_takes_the_memory_of_the_last_one_over() -> None:
    """So a conversation never needs room for two of itself."""

    class Moving(KeepingEngine):
        moves = copies = 0

        def copy(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
            self.copies += 1
            super().copy(source, sequence, upto, max_tokens)

        def move(self, source: int, sequence: int, upto: int, max_tokens: int) -> None:
            self.moves += 1
            self.kv[sequence] = self.kv.pop(source)[:upto]

    ring = CachingRing(2, lambda index, num: Moving(index == 0, index == num - 1))
    talk = list(PROMPT)
    for turn in range(4):
        talk += [*await answer(ring, f"t{turn}", talk, 6), 5, 6, 7]
    assert [(engine.moves, engine.copies) for engine in ring.engines] == [(3, 0)] * 2  # type: ignore[attr-defined]
    branches = [ring.submit(f"b{number}", [*talk, number + 9], 3) for number in range(3)]
    ring.run()
    for number, caller in enumerate(branches):
        assert ids(await caller.collect()) == expected([*talk, number + 9], 3, 2)
    assert ring.cache.hits == 3 + 3
    ring.check()


async def test_memory_pressure_empties_the_cache_and_touches_no_answer() -> None:
    ring = CachingRing(2, keeping)
    await answer(ring, "a", PROMPT)
    callers = [ring.submit(f"b{i}", [i + 3, *PROMPT[:40]], 30) for i in range(3)]
    ring.lap()
    ring.driver._scheduler.pressure = 2
    for _ in range(20):
        ring.lap()
    assert not ring.cache.held and not ring.driver.evictions
    ring.driver._scheduler.pressure = 0
    ring.run()
    for i, caller in enumerate(callers):
        assert ids(await caller.collect()) == expected([i + 3, *PROMPT[:40]], 30, 2)


async def test_an_idle_ring_finds_out_that_a_machine_needs_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = CachingRing(2, keeping)
    await answer(ring, "a", PROMPT)
    ring.driver.look()
    assert not ring.sent, "the last frame has just come round"
    monkeypatch.setattr("exo_mesh.rings.runner.driver.IDLE_LAP_S", 0.0)
    ring.driver.look()
    ring.driver.look()
    assert len(ring.sent) == 1
    ring.driver._scheduler.pressure = 2  # as the reports of that frame say
    ring.run()
    assert ring.kv_rows == 0
    ring.driver.look()
    assert not ring.sent, "nothing is kept"


async def test_what_the_surviving_stages_keep_is_used_after_a_loss() -> None:
    ring = CachingRing(3, keeping)
    await answer(ring, "a", PROMPT)
    ring.lose(1)
    ring.run()
    counts(ring)
    assert await answer(ring, "b", PROMPT) == expected(PROMPT, 8, 3)
    assert counts(ring) == [207, 207, 8], "the last stage has kept it"
    assert await answer(ring, "c", PROMPT) == expected(PROMPT, 8, 3)
    assert counts(ring) == [8, 8, 8]
    ring.check()


async def test_a_sequence_that_a_stage_has_lost_is_computed_again() -> None:
    ring = CachingRing(3, keeping)
    await answer(ring, "a", PROMPT)
    ring.engines[1].kv.clear()
    caller = ring.submit("b", PROMPT, 8)
    ring.run()
    events = await caller.collect()
    assert ids(events) == expected(PROMPT, 8, 3)
    assert not events[0].cached
    assert await answer(ring, "c", PROMPT) == expected(PROMPT, 8, 3)
    ring.check()


async def test_with_a_stage_of_an_older_version_the_cache_is_switched_off() -> None:
    class Older(Stage):
        def process(self, frame: Frame) -> StageResult:
            ops = tuple(UnknownOp("Keep", op.sequence) if isinstance(op, Keep) else op for op in frame.ops)
            return super().process(frame.changed(ops=ops))

    ring = CachingRing(2, keeping)
    ring.stages[0] = Older(ring.engines[0], 0)
    for number in range(5):
        assert await answer(ring, f"a{number}", PROMPT) == expected(PROMPT, 8, 2)
    assert not ring.cache.is_on and ring.kv_rows == 0


async def test_where_no_stage_can_copy_the_cache_is_switched_off() -> None:
    class Plain(KeepingEngine):
        copy = None  # type: ignore[assignment]

    ring = CachingRing(2, lambda index, num: Plain(index == 0, index == num - 1))
    for number in range(6):
        assert await answer(ring, f"a{number}", PROMPT) == expected(PROMPT, 8, 2)
    assert not ring.cache.is_on and ring.kv_rows == 0


async def test_a_request_with_a_fault_leaves_nothing() -> None:
    ring = CachingRing(2, keeping)
    caller = ring.submit("a", PROMPT, 8)
    ring.lap()
    ring.engines[1].refuse.add(1)
    ring.run()
    await caller.collect()
    assert caller.error == "bad_row" and ring.kv_rows == 0
    ring.check()


async def test_log_probabilities_of_a_prompt_are_computed_whatever_is_kept() -> None:
    ring = CachingRing(2, keeping)
    await answer(ring, "a", PROMPT)
    counts(ring)
    caller = ring.submit("b", PROMPT, 2, prompt_logprobs=1)
    ring.run()
    await caller.collect()
    assert counts(ring) == [201, 201]
    assert sum(len(message.prompt) for message in caller.messages) == 199


async def test_the_caller_learns_how_much_was_cached() -> None:
    ring = CachingRing(2, keeping)
    await answer(ring, "a", PROMPT)
    caller = ring.submit("b", PROMPT, 2)
    ring.run()
    assert [event.cached for event in await caller.collect()] == [199, 0]


@pytest.mark.parametrize("make", [keeping, recurrent])
async def test_a_request_that_stores_nothing_reads_the_cache_and_leaves_nothing(make: object) -> None:
    ring = CachingRing(2, make, cuts_back=make is keeping)  # type: ignore[arg-type]
    await answer(ring, "a", PROMPT, is_kept=False)
    assert ring.kv_rows == 0 and not ring.cache.held
    await answer(ring, "b", PROMPT)
    before, held = ring.cache.hits, ring.cache.held
    await answer(ring, "c", [*PROMPT, 7, 8], is_kept=False)
    assert ring.cache.hits == before + 1 and ring.cache.held == held


async def test_a_running_request_that_stores_nothing_gives_nothing_to_others() -> None:
    ring = CachingRing(2, keeping, prefill_chunk=32)
    callers = [ring.submit(f"r{number}", PROMPT, 4, is_kept=False) for number in range(2)]
    ring.run()
    assert [ids(await caller.collect()) for caller in callers] == [expected(PROMPT, 4, 2)] * 2
    assert ring.cache.hits == 0 and ring.kv_rows == 0


async def test_only_requests_of_one_scope_share_what_is_kept() -> None:
    ring = CachingRing(2, keeping, prefill_chunk=32)
    scopes = [b"", b"one", b"two", b"one", b"", b"two"]
    for number, scope in enumerate(scopes):
        hits = ring.cache.hits
        assert await answer(ring, f"r{number}", PROMPT, cache_scope=scope) == expected(PROMPT, 8, 2)
        assert ring.cache.hits - hits == (scope in scopes[:number])
    together = [ring.submit(f"t{number}", [9, *PROMPT], 4, cache_scope=bytes([number])) for number in range(2)]
    ring.run()
    assert [ids(await caller.collect()) for caller in together] == [expected([9, *PROMPT], 4, 2)] * 2
    assert ring.cache.hits == 3
    ring.check()


async def test_the_caller_learns_where_its_prompt_parts_from_what_is_kept() -> None:
    ring, told = CachingRing(2, keeping), []
    await answer(ring, "a", PROMPT, client="me")
    for client, prompt in (("me", [*PROMPT[:150], 9, 9]), ("other", [*PROMPT[:150], 8, 8]), ("me", [9] * 100)):
        caller = ring.submit(f"r{len(told)}", prompt, 1, client=client)
        ring.run()
        await caller.collect()
        told += [message.prefix for message in caller.messages if message.HasField("prefix")]
    own, others, none = told
    assert (own.common, list(own.theirs), own.is_own) == (150, PROMPT[150:166], True)
    assert (others.common, list(others.theirs), others.is_own) == (150, [], False)
    assert (none.common, none.is_own) == (0, False)


def ring_for(seed: int) -> CachingRing:
    rng = random.Random(seed)
    make, pool = rng.choice([keeping, recurrent]), rng.choice([350, 700, 10_000])
    most = rng.choice([0, 0, 6])
    limits = {"max_tokens": pool, "prefill_chunk": rng.choice([16, 50, 512]), "max_running": rng.choice([1, 3, 8])}
    stages = rng.choice([1, 2, 3])
    return CachingRing(stages, make, cuts_back=make is keeping, most_sequences=most, **limits)


async def run_schedule(seed: int) -> CachingRing:
    ring = ring_for(seed)
    stages = len(ring.stages)
    await Schedule(seed, ring, lambda prompt, tokens: expected(prompt, tokens, stages), VOCAB).run(40)
    ring.check()
    return ring


async def test_every_answer_is_the_same_in_random_schedules() -> None:
    hits = 0
    for seed in range(60):
        hits += (await run_schedule(seed)).cache.hits
    assert hits > 200


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_any_number_of_requests_leaves_no_more_than_the_pool(count: int) -> None:
    rng, ring = random.Random(count), CachingRing(1, keeping, max_tokens=3000)
    known = [PROMPT]
    for number in range(count):
        base = rng.choice(known[-20:])
        prompt = (base[: rng.randrange(len(base))] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(70, 90))])[
            :250
        ]
        known.append(prompt)
        await answer(ring, f"r{number}", prompt, 1)
    del known[:]
    ring.check()
    cache = ring.cache
    assert cache.evictions > count / 4 and cache.hits > count / 20
    assert sum(index.num_blocks for index in cache._indexes.values()) <= 3000 // 64
    driver = ring.driver
    assert not (driver._by_request or driver.callers._updates or driver._ops or driver.laps._sent or cache._dropped)
    cache._drop_all()
    driver.pump()
    ring.run()
    assert ring.kv_rows == 0 and not cache._indexes and not cache._kept and cache.tokens == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_every_answer_is_the_same_in_thousands_of_random_schedules() -> None:
    first = int(os.environ.get("EXO_MESH_TEST_SEED", "1000"))
    for seed in range(first, first + 2000):
        await run_schedule(seed)


@pytest.mark.parametrize("laps_between", [0, 1, 3])
async def test_requests_that_begin_alike_at_once_compute_the_common_part_once(laps_between: int) -> None:
    ring, callers = CachingRing(2, keeping, prefill_chunk=32), []
    prompts = [[*PROMPT, *[number + 3] * 5] for number in range(8)]
    for number, prompt in enumerate(prompts):
        callers.append(ring.submit(f"r{number}", prompt, 6))
        for _ in range(laps_between):
            ring.lap()
    ring.run()
    for prompt, caller in zip(prompts, callers, strict=True):
        assert ids(await caller.collect()) == expected(prompt, 6, 2)
    assert counts(ring) == [len(PROMPT) + 8 * (4 + 6)] * 2
    ring.check()


async def test_who_waits_for_a_request_that_is_cancelled_computes_the_prompt() -> None:
    ring = CachingRing(2, keeping, prefill_chunk=32)
    first, second = ring.submit("a", PROMPT, 6), ring.submit("b", [*PROMPT, 5], 6)
    ring.lap()
    ring.driver.cancel("a", first.mailbox)
    ring.run()
    assert ids(await second.collect()) == expected([*PROMPT, 5], 6, 2)
    ring.check()

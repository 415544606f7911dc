"""A driver keeps what came out under an idempotency key: told again, taken over, and freed."""

from __future__ import annotations

import pytest

from exo_mesh.domain.request import GenerateRequest, SamplingParams
from tests.rings.runner.test_stage_and_driver import Caller, Ring, expected, ids, request

PROMPT = [5, 6, 7]


def keyed(name: str = "r", tokens: int = 8, fingerprint: bytes = b"f" * 32, **changes: object) -> GenerateRequest:
    return request(name, PROMPT, tokens, key_hash=b"k" * 32, fingerprint=fingerprint, **changes)


async def test_a_finished_answer_is_told_again_without_a_frame() -> None:
    ring, first, again = Ring(2), Caller(), Caller()
    ring.driver.submit(keyed(), first.mailbox)
    ring.run()
    told = await first.collect()
    ring.driver.submit(keyed("other id"), again.mailbox)
    assert not ring.sent
    ring.run()
    assert await again.collect() == told and ids(told) == expected(PROMPT, 8, 2)
    assert ring.kv_rows == 0 and ring.driver.num_running == 0


@pytest.mark.parametrize("name", ["the same id", "another id"])
@pytest.mark.parametrize("laps", [1, 3, 6])
async def test_who_asks_again_takes_over_without_a_gap_and_the_first_is_told(name: str, laps: int) -> None:
    ring, first, again = Ring(2), Caller(), Caller()
    ring.driver.submit(keyed("the same id"), first.mailbox)
    for _ in range(laps):
        ring.lap()
    ring.driver.submit(keyed(name), again.mailbox)
    ring.run()
    before = ids(await first.collect())
    assert first.error == "superseded"
    events = await again.collect()
    assert ids(events) == expected(PROMPT, 8, 2) and ids(events)[: len(before)] == before
    assert [event.index for event in events] == list(range(8))
    assert ring.kv_rows == 0 and ring.driver.num_running == 0


async def test_a_caller_that_left_finds_what_came_out_and_a_third_one_the_end() -> None:
    ring, first, again = Ring(2), Caller(), Caller()
    ring.driver.submit(keyed(), first.mailbox)
    for _ in range(4):
        ring.lap()
    ring.driver.cancel("r", first.mailbox)
    ring.run()
    assert ring.kv_rows == 0
    kept = ring.driver.replays.num_tokens(b"k" * 32)
    assert kept is not None and 0 < kept < 8
    ring.driver.submit(keyed(), again.mailbox)
    ring.run()
    assert ids(await again.collect()) == expected(PROMPT, 8, 2)
    assert ring.driver.replays.num_tokens(b"k" * 32) == 8


async def test_what_the_entry_peer_knows_already_is_not_told_again() -> None:
    """It goes on after a ring that was lost, on one that has never heard of the key."""
    whole = expected(PROMPT, 8, 2)
    ring, resumed, again = Ring(2), Caller(), Caller()
    ring.driver.submit(keyed(resume_ids=tuple(whole[:5]), resumed=True), resumed.mailbox)
    ring.run()
    events = await resumed.collect()
    assert ids(events) == whole[5:] and events[0].index == 5
    ring.driver.submit(keyed(), again.mailbox)
    ring.run()
    assert ids(await again.collect()) == whole


async def test_log_probabilities_that_another_ring_knew_are_computed_anew() -> None:
    whole = expected(PROMPT, 8, 2)
    sampling = SamplingParams(temperature=0, logprobs=2)
    ring, resumed, again = Ring(2), Caller(), Caller()
    ring.driver.submit(keyed(resume_ids=tuple(whole[:5]), sampling=sampling), resumed.mailbox)
    ring.run()
    await resumed.collect()
    ring.driver.submit(keyed(sampling=sampling), again.mailbox)
    ring.run()
    events = await again.collect()
    assert ids(events) == whole and all(event.HasField("logprob") and len(event.top) == 2 for event in events)


async def test_another_request_with_the_key_is_refused_and_changes_nothing() -> None:
    ring, first, other = Ring(2), Caller(), Caller()
    ring.driver.submit(keyed(), first.mailbox)
    ring.lap()
    ring.driver.submit(keyed("other", fingerprint=b"g" * 32), other.mailbox)
    ring.run()
    await other.collect()
    assert other.error == "idempotency_key_reused"
    assert ids(await first.collect()) == expected(PROMPT, 8, 2)


async def test_a_request_that_gets_no_place_in_the_queue_is_nobodys_worker() -> None:
    ring, refused, again = Ring(1, max_waiting=0), Caller(), Caller()
    ring.driver.submit(keyed(), refused.mailbox)
    ring.run()
    await refused.collect()
    assert refused.error == "overloaded" and ring.driver.replays.worker(b"k" * 32) is None
    ring.driver.submit(keyed(resumed=True), again.mailbox)
    ring.run()
    assert ids(await again.collect()) == expected(PROMPT, 8, 1)

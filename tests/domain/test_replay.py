"""Answers kept for those who ask again: what is told again, and how much is kept."""

from __future__ import annotations

import pytest

from exo_mesh.domain.replay import LOGPROBS_COUNT, RETENTION_S, Kept, ReplayStore
from exo_mesh.domain.request import FinishReason, GenerateRequest, SamplingParams, TokenEvent, TokenLogprob
from exo_mesh.errors import KeyReusedError


def a_request(key: int = 1, fingerprint: bytes = b"f", logprobs: int | None = None) -> GenerateRequest:
    sampling = SamplingParams(logprobs=logprobs)
    return GenerateRequest("r", (1, 2), 100, sampling, key_hash=bytes([key % 256, key // 256]), fingerprint=fingerprint)


def filled(kept: Kept, count: int, finish: FinishReason | None = None, *, details: bool = False) -> list[TokenEvent]:
    start = len(kept.ids)
    events = [
        TokenEvent(index, index + 10, -0.5 if details else None, (TokenLogprob(3, -1.0),) if details else ())
        for index in range(start, start + count)
    ]
    if finish is FinishReason.STOP:
        events.append(TokenEvent(start + count, None, finish=finish))
    elif finish is not None:
        last = events[-1]
        events[-1] = TokenEvent(last.index, last.token_id, last.logprob, last.top, finish)
    for event in events:
        kept.add(event)
    return events


@pytest.mark.parametrize("finish", [None, FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("details", [False, True])
def test_what_came_out_is_told_again_as_it_was(finish: FinishReason | None, details: bool) -> None:
    kept = ReplayStore().open(a_request(logprobs=1 if details else None), 0)
    events = filled(kept, 5, finish, details=details)
    assert kept.events(0) == events and kept.events(3) == events[3:]


def test_a_key_stands_for_one_request() -> None:
    store = ReplayStore()
    filled(store.open(a_request(), 0), 3)
    assert len(store.open(a_request(), 1).ids) == 3
    with pytest.raises(KeyReusedError) as caught:
        store.open(a_request(fingerprint=b"other"), 2)
    assert caught.value.param == "Idempotency-Key"


def test_what_another_ring_drew_is_taken_over() -> None:
    kept = ReplayStore().open(a_request(), 0)
    filled(kept, 2)
    kept.meet([10, 11, 12, 13])
    assert [event.token_id for event in kept.events(0)] == [10, 11, 12, 13]
    kept.meet([10])
    assert len(kept.ids) == 4, "this one knows more than whoever asks"


def test_tokens_whose_log_probabilities_are_not_known_are_computed_anew_if_they_are_wanted() -> None:
    kept = ReplayStore().open(a_request(logprobs=2), 0)
    kept.meet([10, 11, 12])
    filled(kept, 2, details=True)
    kept.meet([10, 11, 12])
    assert [event.logprob for event in kept.events(3)] == [-0.5, -0.5], "whoever knows the first three gets the others"
    kept.meet([10])
    assert list(kept.ids) == [10] and kept.events(1) == []


def test_it_is_kept_for_a_while_and_then_forgotten() -> None:
    store = ReplayStore()
    kept = store.open(a_request(), 0)
    store.close(kept, 100)
    assert store.open(a_request(), 100 + RETENTION_S) is kept
    store.close(kept, 800)
    assert store.open(a_request(fingerprint=b"other"), 801 + RETENTION_S) is not kept


def test_number_and_size_are_bounded_and_what_runs_stays() -> None:
    store = ReplayStore(max_kept=10, max_tokens=1000)
    running = store.open(a_request(0), 0)
    for key in range(1, 100):
        kept = store.open(a_request(key), key)
        filled(kept, 50)
        store.close(kept, key)
    assert len(store) == 10 and store.peek(a_request(0).key_hash) is running
    big = store.open(a_request(200, logprobs=1), 200)
    filled(big, 1000 // LOGPROBS_COUNT + 1, details=True)
    assert store.peek(a_request(200).key_hash) is big
    store.close(big, 201)
    assert store.peek(a_request(200).key_hash) is None and store.peek(a_request(0).key_hash) is running

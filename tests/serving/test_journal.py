"""The entry peer's memory of a request: gapless, bounded, and enough to go on elsewhere."""

from __future__ import annotations

import pytest

from exo_mesh.domain.request import FinishReason, GenerateRequest, SamplingParams, TokenEvent
from exo_mesh.errors import InputError, OverloadError, TransportError
from exo_mesh.serving.journal import Journal


def request(request_id: str = "r") -> GenerateRequest:
    return GenerateRequest(request_id, (1, 2, 3), 10, SamplingParams(seed=42))


def test_a_resumption_goes_on_after_what_was_emitted_with_the_same_seed() -> None:
    entry = Journal().open(request(), "m", 0.0)
    for index, token in enumerate((7, 8)):
        assert entry.accept(TokenEvent(index, token))
    assert entry.resumption.resume_ids == (7, 8)
    assert entry.resumption.sampling.seed == 42 and entry.resumption.prompt_ids == (1, 2, 3)


def test_repeats_are_dropped_and_gaps_are_an_error() -> None:
    entry = Journal().open(request(), "m", 0.0)
    assert entry.accept(TokenEvent(0, 7))
    assert not entry.accept(TokenEvent(0, 7))
    with pytest.raises(TransportError, match="from token 1 to token 3"):
        entry.accept(TokenEvent(3, 9))


def test_an_end_without_a_token_is_accepted_once_the_rest_is_there() -> None:
    entry = Journal().open(request(), "m", 0.0)
    assert entry.accept(TokenEvent(0, None, finish=FinishReason.STOP))
    assert entry.emitted == []


def test_an_id_is_live_once_and_room_is_bounded() -> None:
    journal = Journal(max_live=2)
    journal.open(request("a"), "m", 0.0)
    with pytest.raises(InputError, match="a is running already"):
        journal.open(request("a"), "m", 0.0)
    journal.open(request("b"), "m", 0.0)
    with pytest.raises(OverloadError):
        journal.open(request("c"), "m", 0.0)


def test_a_closed_request_is_history() -> None:
    journal = Journal()
    entry = journal.open(request("r"), "m", 0.0)
    entry.accept(TokenEvent(0, 7))
    entry.ttft_s = 0.5
    journal.close(entry, "stop", 2.0)
    (outcome,) = journal.history.recent(10)
    assert (len(journal), outcome.request_id, outcome.output_tokens, outcome.duration_s) == (0, "r", 1, 2.0)


def test_cancelling_tells_whoever_is_waiting() -> None:
    journal = Journal()
    entry = journal.open(request(), "m", 0.0)
    told: list[str] = []
    entry.on_cancel = lambda: told.append("stop")
    assert journal.cancel("r") and told == ["stop"] and entry.cancelled


@pytest.mark.parametrize("key_id", ["", "0a1b2c3d"])
def test_a_request_of_another_api_key_is_one_that_nobody_knows(key_id: str) -> None:
    journal = Journal()
    entry = journal.open(GenerateRequest("r", (1,), 9, key_id=key_id), "m", 0.0)
    assert not journal.cancel("r", "ffffffff") and not entry.cancelled
    assert journal.cancel("r", key_id) and entry.cancelled
    journal.close(entry, "cancelled", 1.0)
    assert [one.request_id for one in journal.history.recent(9, key_id)] == ["r"]
    assert not journal.history.recent(9, "ffffffff")
    assert not journal.cancel("unknown")

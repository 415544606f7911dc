"""The history has one entry for a call of several requests."""

from __future__ import annotations

from typing import Any

import pytest

from exo_mesh.rings.serving.call_tally import CallTally
from exo_mesh.rings.serving.history import RequestOutcome


def ended(number: int, outcome: str = "stop", duration_s: float = 2.0, **fields: Any) -> RequestOutcome:
    values: dict[str, Any] = {"prompt_tokens": 3, "output_tokens": 1, "ttft_s": 0.5, **fields}
    return RequestOutcome(f"call.{number}", "m", outcome, duration_s=duration_s, **values)


def total(*parts: tuple[RequestOutcome, float]) -> RequestOutcome:
    tally, recorded = CallTally("call"), list[RequestOutcome]()
    for one, entered_at in parts:
        tally.add(one, entered_at, recorded.append)
    assert not recorded, "the call has not ended"
    tally.close()
    tally.close()
    (found,) = recorded
    return found


def test_tokens_add_up_and_times_are_those_of_the_call() -> None:
    late = ended(1, ttft_s=1.0, cached_tokens=2, memory_before_bytes=7, memory_after_bytes=8)
    early = ended(2, ttft_s=0.25, cached_tokens=1, memory_after_bytes=9)
    found = total((late, 11.0), (early, 10.0), (ended(3, ttft_s=None), 12.5))
    assert (found.request_id, found.model, found.outcome) == ("call", "m", "stop")
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (9, 3, 3)
    assert (found.ttft_s, found.duration_s) == (0.25, 4.5)
    assert (found.memory_before_bytes, found.memory_after_bytes) == (7, 0)


@pytest.mark.parametrize(
    ("outcomes", "of_call"),
    [
        (["stop", "stop"], "stop"),
        (["stop", "cancelled", "stop"], "cancelled"),
        (["cancelled", "engine_error", "overloaded", "cancelled"], "engine_error"),
        (["stop", "deadline_exceeded"], "deadline_exceeded"),
    ],
)
def test_the_first_error_decides_and_cancelling_only_without_one(outcomes: list[str], of_call: str) -> None:
    assert total(*((ended(number, outcome), 0.0) for number, outcome in enumerate(outcomes))).outcome == of_call


def test_a_call_of_which_no_request_began_is_not_recorded() -> None:
    CallTally("call").close()

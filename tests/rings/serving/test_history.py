"""What is told of requests that have ended."""

from __future__ import annotations

from typing import Any

import pytest

from exo_mesh.errors import InputError, StageLostError
from exo_mesh.rings.serving.history import History, RequestOutcome, message_for_the_log

MAX_RECENT = 50


def add(history: History, number: int, outcome: str = "stop", tokens: int = 11, duration_s: float = 2.0) -> None:
    history.add(ended(f"r{number}", outcome, tokens=tokens, duration_s=duration_s))


def ended(
    request_id: str, outcome: str = "stop", *, tokens: int = 11, duration_s: float = 2.0, **fields: Any
) -> RequestOutcome:
    return RequestOutcome(request_id, "m", outcome, 3, tokens, 0.5, duration_s, **fields)


def test_the_newest_comes_first_and_details_are_bounded() -> None:
    history = History(now=lambda: 7.0, max_recent=MAX_RECENT)
    for number in range(3 * MAX_RECENT):
        add(history, number)
    assert len(history) == MAX_RECENT
    assert [outcome.request_id for outcome in history.recent(2)] == [f"r{3 * MAX_RECENT - 1}", f"r{3 * MAX_RECENT - 2}"]
    assert history.recent(1)[0].describe() == {
        "request_id": f"r{3 * MAX_RECENT - 1}",
        "model": "m",
        "outcome": "stop",
        "prompt_tokens": 3,
        "error_message": "",
        "cached_tokens": 0,
        "accepted_drafts": 0,
        "rejected_drafts": 0,
        "output_tokens": 11,
        "ttft_s": 0.5,
        "duration_s": 2.0,
        "max_tokens": 0,
        "memory_before_bytes": 0,
        "memory_after_bytes": 0,
        "memory_delta_bytes": 0,
        "ended_at": 7.0,
        "key_id": "",
        "trace_id": "",
        "kind": "completion",
        "status": "ok",
        "tokens_per_s": 6.67,
    }
    assert history.stats()["total"] == 3 * MAX_RECENT


def test_sums_count_errors_and_latencies_those_that_went_well() -> None:
    history = History()
    for number in range(1, 101):
        add(history, number, duration_s=number / 100)
    add(history, 101, "engine_error", duration_s=1000.0)
    add(history, 102, "cancelled", tokens=0, duration_s=1000.0)
    stats = history.stats()
    assert (stats["total"], stats["errors"], stats["error_rate"]) == (102, 1, round(1 / 102, 4))
    assert stats["outcomes"] == {"cancelled": 1, "engine_error": 1, "stop": 100}
    assert stats["latency_s"] == {"p50": 0.505, "p95": 0.9505}
    assert stats["output_tokens"] == 101 * 11


def test_sums_of_the_last_minute_and_the_time_since_the_start() -> None:
    now = [100.0]
    history = History(now=lambda: now[0])
    add(history, 1, tokens=3)
    now[0] = 150.0
    add(history, 2, "engine_error", tokens=5)
    now[0] = 161.0
    stats = history.stats()
    assert (stats["uptime_s"], stats["last_minute"]) == (61.0, {"requests": 1, "errors": 1, "output_tokens": 5})


def test_before_the_first_request_there_is_nothing_to_say() -> None:
    stats = History().stats()
    assert (stats["total"], stats["error_rate"], stats["latency_s"], stats["avg_tokens_per_s"]) == (0, 0.0, None, None)


@pytest.mark.parametrize(
    ("outcome", "timed_out", "status"),
    [
        ("stop", False, "ok"),
        ("length", False, "ok"),
        ("length", True, "timeout"),
        ("deadline_exceeded", False, "timeout"),
        ("cancelled", False, "cancelled"),
        ("overloaded", False, "error"),
        ("stage_lost", False, "error"),
    ],
)
def test_each_outcome_has_a_status(outcome: str, timed_out: bool, status: str) -> None:
    assert ended("r", outcome, timed_out=timed_out).status == status


def test_the_kind_is_that_of_the_route() -> None:
    assert [ended(name).kind for name in ("chatcmpl-1", "cmpl-1")] == ["chat", "completion"]


def test_the_message_of_an_error_is_kept_without_a_clients_words() -> None:
    assert message_for_the_log(InputError('"zebra" is no word', param="stop")) == (
        "the request was refused because of stop"
    )
    assert message_for_the_log(StageLostError("peer b ended" + "!" * 400))[:12] == "peer b ended"
    history = History()
    history.add(ended("r1", outcome="stage_lost", error_message="peer b ended"))
    shown = history.recent(1)[0].describe()
    assert (shown["status"], shown["error_message"]) == ("error", "peer b ended")


def test_each_one_is_written_as_it_is_told() -> None:
    written: list[Any] = []
    history = History(now=lambda: 7.0, write=written.append)
    history.add(ended("r1", memory_before_bytes=5, memory_after_bytes=7))
    assert written == [history.recent(1)[0].describe()] and written[0]["memory_delta_bytes"] == 2

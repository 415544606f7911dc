"""What is remembered of runners, and how much of it."""

from __future__ import annotations

from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.rings.hosting.flight_recorder import MAX_ENTRIES, MAX_RUNNERS, FlightRecorder


def test_the_last_phases_of_the_last_runners_are_kept_and_no_more() -> None:
    recorder = FlightRecorder()
    alive = recorder.open("alive")
    for number in range(3 * MAX_RUNNERS):
        log = recorder.open(f"runner {number}")
        for step in range(2 * MAX_ENTRIES):
            log.note(f"phase {step}", "x" * 1000)
        log.ended = True
    assert len(recorder.logs) == MAX_RUNNERS and recorder.logs[0] is alive
    last = recorder.logs[-1].describe()
    assert len(last) == MAX_ENTRIES and last[-1]["phase"] == f"phase {2 * MAX_ENTRIES - 1}"
    assert max(len(entry["detail"]) for entry in last) < 1000


def test_a_phase_that_lasts_is_one_entry_with_its_newest_figures() -> None:
    times = iter(float(second) for second in range(100))
    log = FlightRecorder(lambda: next(times)).open("r")
    beats = [(0, 0), (1, 0), (2, 0), (2, 5), (2, 9), (2, 9), (2, 9)]  # (prefill, decode) frames so far
    for prefill, decode in beats:
        log.beat(Heartbeat(prefill_frames=prefill, decode_frames=decode, memory_bytes=7))
    shown = [(e["phase"], e["at"], e["until"], e["count"], e["attrs"]["frames"]) for e in log.describe()]
    assert shown == [("idle", 0, 0, 1, 0), ("prefill", 1, 2, 2, 2), ("decode", 3, 4, 2, 11), ("idle", 5, 6, 2, 11)]


def test_a_frame_that_does_not_end_shows_as_its_kind() -> None:
    log = FlightRecorder().open("r")
    for _ in range(3):
        log.beat(Heartbeat(computing_tokens=512, computing_prefill=True))
    assert [(entry["phase"], entry["count"]) for entry in log.describe()] == [("prefill", 3)]

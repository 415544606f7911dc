"""Copying keeps to a quarter of the time while streams run."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from exo_mesh.models.file_server.pace import BUSY_PIECE_BYTES, MAX_REST_S, CopyPace


class StoppedClock(threading.Event):
    """An event nobody sets, which counts how long it was waited for instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return False


def test_a_piece_is_followed_by_three_times_its_time() -> None:
    clock = StoppedClock()
    pace = CopyPace(lambda: True, lambda: clock.now)
    pace.rest(0.2, clock)
    assert clock.now == pytest.approx(0.6)
    assert pace.piece_bytes(2**22) == BUSY_PIECE_BYTES and pace.piece_bytes(100) == 100


def test_several_copies_keep_to_the_quarter_together() -> None:
    pace = CopyPace(lambda: True)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(pace.copying())
        assert pace.rest_s(0.01) == pytest.approx(0.11)  # 3 x 0.01 s of 0.12 s
    assert pace.rest_s(0.01) == pytest.approx(0.03)
    assert pace.rest_s(10.0) == MAX_REST_S


def test_nobody_pauses_where_no_streams_run_or_when_the_last_has_ended() -> None:
    clock = StoppedClock()
    idle = CopyPace(lambda: False, lambda: clock.now)
    idle.rest(5.0, clock)
    assert clock.now == 0.0 and idle.piece_bytes(2**22) == 2**22
    ending = CopyPace(lambda: clock.now < 0.1, lambda: clock.now)
    ending.rest(5.0, clock)
    assert clock.now == pytest.approx(0.1)

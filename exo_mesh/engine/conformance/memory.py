"""Checks that the memory of a sequence is freed, and that nothing grows."""

from __future__ import annotations

import gc
import threading
import time
from itertools import count

import pytest

from exo_mesh.domain.frame import Row
from exo_mesh.engine.conformance.stages import Stages

__all__ = [
    "test_figures_may_be_read_from_another_thread_at_any_time",
    "test_nothing_grows_over_two_hundred_sequences",
    "test_removing_frees_kv_and_an_unknown_sequence_is_no_error",
]

CYCLES = 200
WARM_UP = 20
MIN_READS = 5
READS_WITHIN_S = 30.0
"""Seconds that the reading thread of a test may take for MIN_READS; on a busy machine it waits for its turn."""


def cycle(stages: Stages, sequence: int) -> None:
    """Insert a sequence, compute it, and remove it."""
    stages.insert(sequence)
    stages.logits([Row(sequence, 0, 4, 1)])
    stages.remove(sequence)


def test_removing_frees_kv_and_an_unknown_sequence_is_no_error(stages: Stages) -> None:
    cycle(stages, 1)  # scratch space and compiled kernels are made once and stay
    before = [engine.memory_bytes() for engine in stages.engines]
    stages.insert(1)
    stages.logits([Row(1, 0, 40, 1)])
    for engine, was in zip(stages.engines, before, strict=True):
        if engine.capabilities.kv:
            assert engine.memory_bytes() > was
    for engine in stages.engines:
        engine.remove(1)
        engine.remove(77)
        assert not engine.sequences()
    assert [engine.memory_bytes() for engine in stages.engines] == before
    assert {fault.sequence for fault in stages.forward([Row(1, 0, 1, 1)]).faults} == {1}


def test_nothing_grows_over_two_hundred_sequences(stages: Stages) -> None:
    for sequence in range(WARM_UP):
        cycle(stages, sequence)
    gc.collect()
    before = [engine.memory_bytes() for engine in stages.engines]
    objects = len(gc.get_objects())
    for sequence in range(WARM_UP, WARM_UP + CYCLES):
        cycle(stages, sequence)
    gc.collect()
    assert [engine.memory_bytes() for engine in stages.engines] == before
    assert not any(engine.sequences() for engine in stages.engines)
    assert len(gc.get_objects()) - objects < CYCLES // 2, "objects stay behind"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_figures_may_be_read_from_another_thread_at_any_time(stages: Stages) -> None:
    """Heartbeats read these figures while frames are computed. An error in the other thread fails the test."""
    stop = threading.Event()
    read = 0

    def look() -> None:
        nonlocal read
        while not stop.wait(0.0001):  # without a pause this thread would rarely release the interpreter
            for engine in stages.engines:
                assert engine.memory_bytes() >= 0
                assert len(engine.sequences()) <= 1
            read += 1

    watcher = threading.Thread(target=look)
    watcher.start()
    give_up_at = time.monotonic() + READS_WITHIN_S
    try:
        for sequence in count():
            # a fast engine has finished all cycles before the other thread runs for the first time
            if (sequence >= WARM_UP and read >= MIN_READS) or not watcher.is_alive() or time.monotonic() > give_up_at:
                break
            cycle(stages, sequence)
    finally:
        stop.set()
        watcher.join(30)
    assert read >= MIN_READS

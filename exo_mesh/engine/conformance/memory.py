"""What a sequence takes comes back, and nothing grows."""

from __future__ import annotations

import gc
import itertools
import threading

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


def cycle(stages: Stages, sequence: int) -> None:
    """A sequence comes, is computed, and goes."""
    stages.insert(sequence)
    stages.logits([Row(sequence, 0, 4, 1)])
    stages.remove(sequence)


def test_removing_frees_kv_and_an_unknown_sequence_is_no_error(stages: Stages) -> None:
    cycle(stages, 1)  # what is made once stays: scratch space, compiled kernels
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
    """As heartbeats do while frames are computed. An error there fails the test."""
    stop, read = threading.Event(), threading.Event()

    def look() -> None:
        while not stop.wait(0.0001):  # without a pause it would hardly let go of the interpreter
            for engine in stages.engines:
                assert engine.memory_bytes() >= 0
                assert len(engine.sequences()) <= 1
            read.set()

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for sequence in itertools.count():
            cycle(stages, sequence)
            # a fast engine may be done with all of them before the other thread has had its first turn
            if sequence >= WARM_UP and (read.is_set() or not watcher.is_alive()):
                break
    finally:
        stop.set()
        watcher.join(30)
    assert read.is_set()

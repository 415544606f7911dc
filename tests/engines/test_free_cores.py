"""An engine computes with as many threads as other programs leave cores free."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exo_mesh_numpy.threads import set_threads, threads_by_load
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exo_mesh.domain.frame import Row
from exo_mesh.engine import free_cores
from exo_mesh.engine.free_cores import FIRST_S, CpuReading, FreeCores, ThreadsByLoad, quota_cores, read_cpu, threads_for
from exo_mesh.engine.registry import providers
from exo_mesh.weights.random_checkpoint import TinyModel, write_checkpoint
from tests.support.ring import Ring


@pytest.mark.parametrize(
    ("free", "now", "most", "wanted"),
    [
        (2.0, 2, 2, 2),
        (1.7, 2, 2, 2),  # a node and its desktop use a little
        (1.3, 2, 2, 1),  # one busy program beside two threads on two cores
        (1.0, 1, 2, 1),
        (0.1, 2, 2, 1),  # twenty
        (1.7, 1, 2, 1),
        (1.9, 1, 2, 2),
        (15.1, 16, 16, 15),
        (16.0, 3, 16, 16),
        (16.0, 3, 4, 4),
        (0.0, 1, 1, 1),
        (-3.0, 8, 8, 1),
    ],
)
def test_threads_follow_the_free_cores(free: float, now: int, most: int, wanted: int) -> None:
    assert threads_for(free, now, most) == wanted


@given(st.floats(-4, 64), st.integers(1, 64), st.integers(1, 64))
def test_the_number_stays_where_it_is_while_the_load_does(free: float, now: int, most: int) -> None:
    once = threads_for(free, min(now, most), most)
    assert 1 <= once <= most and threads_for(free, once, most) == once


class Machine:
    """Two cores, on which others use `others` of a core while this process uses two."""

    def __init__(self) -> None:
        self.now = CpuReading(0.0, 100.0, 5.0)

    def later(self, others: float, own: float = 0.0) -> None:
        before = self.now
        self.now = CpuReading(before.at_s + 1.0, before.busy_s + others + own, before.own_s + own)


def test_the_time_of_the_process_itself_does_not_count() -> None:
    machine = Machine()
    cores = FreeCores(2, lambda: machine.now, num_cores=2)
    assert cores.threads == 2
    machine.later(0.05, own=1.95)
    assert cores.follow() == 2
    machine.later(1.9, own=0.1)
    assert cores.follow() == 1
    assert cores.follow() == 1, "no time has passed"
    machine.later(0.0)
    assert cores.follow() == 2


def test_the_time_of_the_node_that_started_the_process_does_not_count() -> None:
    code = """
from exo_mesh.engine.free_cores import read_cpu
before = read_cpu()
print(flush=True)
input()
print(read_cpu().own_s - before.own_s)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        began = time.process_time()
        while time.process_time() - began < 0.1:
            pass
        own_s = float(child.communicate("\n", timeout=60)[0])
    assert own_s >= 0.08, "the system counts in steps of 0.01 s"


def test_a_reading_from_before_a_rest_says_nothing_of_now() -> None:
    """Sixty idle seconds and then full load: an average over all of it would leave the threads as they were."""
    machine = Machine()
    cores = FreeCores(2, lambda: machine.now, num_cores=2)
    machine.now = replace(machine.now, at_s=60.0)
    assert cores.follow() == 2
    machine.now = CpuReading(60.0 + FIRST_S, machine.now.busy_s + 2 * FIRST_S, machine.now.own_s)
    assert cores.follow() == 1


def test_a_quota_of_a_container_bounds_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, group = tmp_path / "own", tmp_path / "groups" / "machine" / "box"
    group.mkdir(parents=True)
    own.write_text("0::/machine/box\n")
    assert quota_cores(tmp_path / "groups", own) == math.inf, "no limit anywhere"
    (group / "cpu.max").write_text("max 100000\n")
    (group.parent / "cpu.max").write_text("150000 100000\n")
    assert quota_cores(tmp_path / "groups", own) == 1.5, "the group above has one"
    monkeypatch.setattr(free_cores, "quota_cores", lambda: 1.5)
    applied: list[int] = []
    followed = ThreadsByLoad(64, applied.append)
    followed.close()
    assert applied == [2, 64]


def test_a_reading_counts_the_cores_of_this_process_only() -> None:
    before, total = read_cpu(), 0.0
    while (after := read_cpu()).at_s - before.at_s < 0.1:
        total += float(np.ones(1000).sum())
    assert after.own_s > before.own_s and after.busy_s >= before.busy_s and total > 0


@pytest.mark.skipif(set_threads("auto") is None, reason="this NumPy has no OpenBLAS of its own")
def test_blas_follows_the_load_and_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set_threads("auto")
    machine = Machine()

    class Following(FreeCores):
        def __init__(self, most: int) -> None:
            super().__init__(most, lambda: machine.now, num_cores=2)

        def is_due(self) -> bool:
            return True

    monkeypatch.setattr(free_cores, "FreeCores", Following)
    try:
        set_threads("2")
        blas = threads_by_load("auto")
        assert blas is not None
        machine.later(2.0)
        blas.adapt()
        assert set_threads("auto") == 1
        machine.later(0.0)
        blas.adapt()
        assert set_threads("auto") == 2
        machine.later(2.0)
        blas.adapt()
        blas.close()
        assert set_threads("auto") == 2
        assert threads_by_load("2") is None, "a number that somebody chose stays"
    finally:
        set_threads(str(before))


def logits_of(provider: Any, directory: Path, **options: str) -> np.ndarray:
    ring = Ring(provider, directory, 3, (), **options)
    ring.insert(1)
    return np.asarray(ring.forward([Row(1, 0, 3, 3)], np.array([1, 2, 3], np.int32)))


@pytest.mark.parametrize(
    ("engine", "num_calls"), [("numpy", 3), pytest.param("torch", 1, marks=pytest.mark.extended), ("llamacpp", 1)]
)
def test_the_threads_of_a_stage_follow_the_load_unless_somebody_chose_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, num_calls: int
) -> None:
    provider = providers()[engine]
    if not provider.availability().available or (engine == "numpy" and set_threads("auto") is None):
        pytest.skip(f"{engine} cannot run here, or chooses its threads itself")
    calls: list[int] = []

    def adapt(self: ThreadsByLoad) -> None:
        if self._most > 1:
            self._apply(1 + len(calls) % 2)
            calls.append(1)

    def now(self: FreeCores) -> int:
        calls.append(1)
        return 1 + len(calls) % 2

    monkeypatch.setattr(ThreadsByLoad, "adapt", adapt)
    monkeypatch.setattr(FreeCores, "now", now)
    directory = write_checkpoint(tmp_path, TinyModel(layers=3))
    with two_threads(engine):
        following = logits_of(provider, directory)
        assert len(calls) >= num_calls
        calls.clear()
        np.testing.assert_allclose(following, logits_of(provider, directory, threads="1"), rtol=0, atol=1e-4)
        assert not calls
    if engine == "torch":
        with two_threads(engine):
            logits_of(provider, directory, batching="off")
            assert not calls, "the bits would depend on the load"


@contextmanager
def two_threads(engine: str) -> Iterator[None]:
    """The library of an engine has two threads, and afterwards as many as before. llama.cpp's are set by context."""
    if engine == "llamacpp":
        yield
        return
    if engine == "torch":
        torch = pytest.importorskip("torch")
        get, put = torch.get_num_threads, torch.set_num_threads
    else:
        get, put = (lambda: set_threads("auto") or 1), (lambda count: set_threads(str(count)))
    before = get()
    put(2)
    try:
        yield
    finally:
        put(before)

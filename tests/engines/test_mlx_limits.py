"""How much memory MLX may take, from the figures of the machine just before a load."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from exo_mesh_mlx import provider
from exo_mesh_mlx.limits import BUFFER_CACHE_BYTES, limits_of

from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, MachineMemory, MemoryTeller
from tests.support.checkpoints import TinyModel, write_checkpoint

GIB = 2**30


@pytest.mark.parametrize(
    ("total", "available", "recommended", "active", "expected", "why"),
    [
        (64, 60, None, 0, 0.85 * 64, "a share of all memory"),
        (64, 60, 48, 0, 48, "what Apple recommends"),
        (24, 7, 16, 0, 6.5, "what is available now"),
        (24, 7, 16, 4, 10.5, "what is available now"),
        (4, 4, None, 0, 3.4, "a share of all memory"),
    ],
)
def test_the_least_of_what_bounds_it_counts(
    total: int, available: int, recommended: int | None, active: int, expected: float, why: str
) -> None:
    machine = MachineMemory(total * GIB, available * GIB)
    limits = limits_of(machine, recommended and recommended * GIB, active * GIB)
    assert limits.memory_bytes == pytest.approx(expected * GIB, rel=1e-6) and limits.why == why


@pytest.mark.parametrize(("available", "cache"), [(60 * GIB, BUFFER_CACHE_BYTES), (GIB, GIB // 16), (0, 2**24)])
def test_a_short_machine_keeps_fewer_buffers(available: int, cache: int) -> None:
    assert limits_of(MachineMemory(64 * GIB, available), None).cache_bytes == cache


def test_mlx_tells_what_it_takes_in_this_process(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "tiny", TinyModel(layers=2))
    engine = provider.create()
    engine.load(LoadRequest(Shard("tiny", 0, 2, 2), directory, 512), lambda done, total: None)
    assert isinstance(engine, MemoryTeller)
    told = engine.library_memory()
    assert told is not None and told.source == "mlx" and told.limit_bytes == mx.get_memory_limit()
    assert 0 < told.active_bytes <= told.peak_bytes
    engine.close()


def test_each_load_sets_the_limits_anew(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "tiny", TinyModel(layers=2))
    before = mx.get_memory_limit()
    try:
        for available in (7 * GIB, 3 * GIB):
            machine = MachineMemory(24 * GIB, available)
            request = LoadRequest(Shard("tiny", 0, 2, 2), directory, 512, memory=machine)
            expected = limits_of(machine, None, mx.get_active_memory())
            provider.create().load(request, lambda done, total: None)
            assert mx.get_memory_limit() == pytest.approx(expected.memory_bytes, rel=0.01)
    finally:
        mx.set_memory_limit(before)
        mx.set_cache_limit(BUFFER_CACHE_BYTES)

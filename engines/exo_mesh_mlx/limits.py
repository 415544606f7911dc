"""Limits MLX's memory in this process, and its cache of buffers."""

from __future__ import annotations

import logging
from typing import NamedTuple

import mlx.core as mx

from exo_mesh.engine.contract import MachineMemory

_log = logging.getLogger(__name__)

BUFFER_CACHE_BYTES = 256 * 2**20
"""Most bytes of freed buffers that MLX may keep for reuse: a few prefill chunks' activations, not a second model."""

LEAST_CACHE_BYTES = 16 * 2**20
"""Least cache on a machine that is short of memory: a sixteenth of the available memory, but no less than this."""

TOTAL_SHARE = 0.85
RESERVE_SHARE, MOST_RESERVE_BYTES = 0.1, 2**30
"""Memory left for the rest of the machine, as in plans."""


class MlxLimits(NamedTuple):
    """The limits in bytes. why: the candidate that was the least."""

    memory_bytes: int
    cache_bytes: int
    why: str


def limits_of(machine: MachineMemory, recommended_bytes: int | None, active_bytes: int = 0) -> MlxLimits:
    """The least of: a share of all memory; all but the reserve for the rest of the machine; Apple's recommendation for
    the GPU's working set; and the memory that is available now, plus what MLX has already (active_bytes)."""
    reserve = min(int(RESERVE_SHARE * machine.total_bytes), MOST_RESERVE_BYTES)
    candidates = {
        "a share of all memory": int(TOTAL_SHARE * machine.total_bytes),
        "what the system leaves": machine.total_bytes - reserve,
        "what is available now": active_bytes + max(0, machine.available_bytes - reserve // 2),
    }
    if recommended_bytes:
        candidates["what Apple recommends"] = recommended_bytes
    why = min(candidates, key=lambda name: candidates[name])
    cache_bytes = max(LEAST_CACHE_BYTES, min(BUFFER_CACHE_BYTES, machine.available_bytes // 16))
    return MlxLimits(candidates[why], cache_bytes, why)


def keep_to(machine: MachineMemory | None) -> None:
    """Limit MLX's memory in this process, by the memory that the machine has now."""
    if machine is None:
        mx.set_cache_limit(BUFFER_CACHE_BYTES)
        return
    recommended = mx.device_info().get("max_recommended_working_set_size")
    limits = limits_of(machine, int(recommended) if recommended else None, mx.get_active_memory())
    mx.set_memory_limit(limits.memory_bytes)
    mx.set_cache_limit(limits.cache_bytes)
    _log.info("MLX may take %.2f GB (%s)", limits.memory_bytes / 1e9, limits.why)

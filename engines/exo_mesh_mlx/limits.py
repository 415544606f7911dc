"""How much memory MLX may take in this process, and how much of it as a cache of buffers."""

from __future__ import annotations

from typing import NamedTuple

from exo_mesh.engine.contract import MachineMemory

BUFFER_CACHE_BYTES = 256 * 2**20
"""What MLX may keep of freed buffers for reuse: a few prefill chunks' activations, not a second model."""

LEAST_CACHE_BYTES = 16 * 2**20
"""A short machine keeps fewer: a sixteenth of what is available, but no less than this."""

TOTAL_SHARE = 0.85
RESERVE_SHARE, MOST_RESERVE_BYTES = 0.1, 2**30
"""Left for the rest of the machine: as plans leave it."""


class MlxLimits(NamedTuple):
    """Bytes. why: which of the candidates is the least."""

    memory_bytes: int
    cache_bytes: int
    why: str


def limits_of(machine: MachineMemory, recommended_bytes: int | None, active_bytes: int = 0) -> MlxLimits:
    """The least of: a share of all memory; all but what the rest of the machine needs; what Apple recommends for the
    GPU's working set; and what is available now, with what MLX has already (active_bytes)."""
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

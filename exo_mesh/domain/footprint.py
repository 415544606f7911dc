"""What a stage takes of its peer's memory: weights, KV pool and the engine itself."""

from __future__ import annotations

from dataclasses import dataclass

from exo_mesh.domain.model import ModelCard

ENGINE_OVERHEAD_BYTES = 256 * 2**20
"""What a runner takes besides weights and KV: interpreter, libraries and the scratch memory of a forward pass.
Measured on Linux with the demo model: 57 MiB resident with the dummy engine, 288 with mlx (198 of them its own)."""

POOL_TOKENS = 8192
"""KV is reserved for at least this many tokens, so that several short requests run side by side."""

POOL_SEQUENCES = 8
"""Sequences that may run at once in a full pool, of a model that keeps something per sequence however short it is: the
state of a recurrent layer, or a window. Other models' sequences are bounded by tokens only."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one stage, by what they are for."""

    weights_bytes: int
    kv_bytes: int
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.overhead_bytes


def footprint(card: ModelCard, start: int, stop: int, pool_tokens: int) -> Footprint:
    """What the stage `[start, stop)` takes with KV for `pool_tokens` tokens of all its sequences together."""
    kv_bytes = card.kv_bytes(start, stop, pool_tokens, pool_sequences(card, pool_tokens))
    return Footprint(card.shard_bytes(start, stop), kv_bytes, ENGINE_OVERHEAD_BYTES)


def stage_bytes(card: ModelCard, start: int, stop: int, pool_tokens: int) -> int:
    """What the stage `[start, stop)` must reserve."""
    return footprint(card, start, stop, pool_tokens).total_bytes


def pool_sequences(card: ModelCard, pool_tokens: int) -> int:
    """Sequences that a pool of so many tokens has room for; 0 if only their tokens count."""
    if not any(card.kv_fixed_bytes):
        return 0
    return POOL_SEQUENCES if pool_tokens >= POOL_TOKENS else 1


def pools_to_try(context_limit: int) -> tuple[int, ...]:
    """Tokens of KV to reserve on every stage, best first: room for several sequences, or for one."""
    return tuple(dict.fromkeys((max(POOL_TOKENS, context_limit), context_limit)))


def gigabytes(num_bytes: int) -> str:
    """For people: GB with two digits behind the point, or MB below one."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"

"""Memory that a stage needs on its peer: weights, KV pool and the engine itself."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from exo_mesh.domain.model import ModelCard

ENGINE_OVERHEAD_BYTES = 256 * 2**20
"""Memory of a runner besides weights and KV: interpreter, libraries and the scratch memory of a forward pass. Measured
on Linux with the demo model: 57 MiB resident with the dummy engine, 288 with mlx (198 of them its own)."""

POOL_TOKENS = 8192
"""KV is reserved for at least this many tokens, so that several short requests run side by side."""

POOL_SEQUENCES = 8
"""Least number of sequences in a full pool, for a model with state of fixed size per sequence (a recurrent layer or a
window). In other models only the number of tokens limits the sequences."""

MOST_SEQUENCES = 32
"""Most sequences that a driver runs at once. A ring makes room for this many, or a half, or a quarter, if cheap."""

LEAST_CHUNK_TOKENS, MOST_CHUNK_TOKENS = 16, 512
"""Prompt tokens of a prefill frame: the smallest limit that can be set, and the default and largest one. 512 tokens of
a 4,096-wide model are 4 MiB of activations in bf16, which 1 GbE carries in 36 ms."""

CHEAP = 4
"""Fixed state of all sequences is cheap if it takes at most 1/CHEAP of the stage's weights. By arithmetic, Qwen3-Next
80B keeps 75 MB per sequence beside 160 GB, so 32 are cheap; Gemma 3 27B keeps 430 MB beside 54 GB, so 16 are. A larger
pool is cheap if its KV takes at most 1/CHEAP of what a stage needs anyway, and of what is free beside that."""

POOL_TIMES = (8, 4, 2)
"""Pools to try, in multiples of the least full one. 8 times 8,192 tokens are 32 sequences of 2,048."""


class Footprint(msgspec.Struct, frozen=True):
    """Bytes of one stage by purpose."""

    weights_bytes: int
    kv_bytes: int
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.overhead_bytes


def footprint(card: ModelCard, start: int, stop: int, pool_tokens: int, sequences: int | None = None) -> Footprint:
    """Memory of the stage `[start, stop)` with KV for `pool_tokens` tokens of all its sequences together. sequences:
    how many there are, by default the least number."""
    least = pool_sequences(card, pool_tokens)
    kv_bytes = card.kv_bytes(start, stop, pool_tokens, least if sequences is None else sequences)
    return Footprint(card.shard_bytes(start, stop), kv_bytes, ENGINE_OVERHEAD_BYTES)


def stage_bytes(card: ModelCard, start: int, stop: int, pool_tokens: int, sequences: int | None = None) -> int:
    """Bytes that the stage `[start, stop)` must reserve."""
    return footprint(card, start, stop, pool_tokens, sequences).total_bytes


def pool_sequences(card: ModelCard, pool_tokens: int) -> int:
    """Least number of sequences that a pool of `pool_tokens` tokens has room for; 0 if only their tokens count."""
    if not any(card.kv_fixed_bytes):
        return 0
    return POOL_SEQUENCES if pool_tokens >= POOL_TOKENS else 1


def roomiest(stages: Sequence[tuple[ModelCard, range, int]], pool_tokens: int) -> int:
    """How many sequences a ring makes room for; 0 if only their tokens count. stages: for each stage the model as its
    engine holds it, its layers, and the bytes that it may use."""
    least = max(pool_sequences(card, pool_tokens) for card, _, _ in stages)
    counts = (MOST_SEQUENCES, MOST_SEQUENCES // 2, MOST_SEQUENCES // 4) if least else ()
    return next((n for n in counts if n > least and all(_affords(*stage, pool_tokens, n) for stage in stages)), least)


def roomiest_pool(stages: Sequence[tuple[ModelCard, range, int]], pool_tokens: int) -> int:
    """Tokens of KV that a ring reserves: a multiple of a full pool if that is cheap on every stage. stages: as for
    `roomiest`. A pool of less than POOL_TOKENS stays as it is: memory is tight."""
    if pool_tokens < POOL_TOKENS:
        return pool_tokens
    sequences = roomiest(stages, pool_tokens)
    larger = (times * pool_tokens for times in POOL_TIMES)
    return next((pool for pool in larger if all(_is_cheap(*stage, pool, sequences) for stage in stages)), pool_tokens)


def _is_cheap(card: ModelCard, layers: range, usable_bytes: int, pool_tokens: int, sequences: int) -> bool:
    parts = footprint(card, layers.start, layers.stop, pool_tokens, sequences)
    needed_bytes = parts.weights_bytes + parts.overhead_bytes
    return CHEAP * parts.kv_bytes <= min(needed_bytes, usable_bytes - needed_bytes)


def _affords(card: ModelCard, layers: range, usable_bytes: int, pool_tokens: int, sequences: int) -> bool:
    parts = footprint(card, layers.start, layers.stop, pool_tokens, sequences)
    fixed_bytes = sequences * sum(card.kv_fixed_bytes[layers.start : layers.stop])
    return parts.total_bytes <= usable_bytes and CHEAP * fixed_bytes <= parts.weights_bytes


def pools_to_try(context_limit: int) -> tuple[int, ...]:
    """Tokens of KV that a ring is chosen with, best first: room for several sequences, or for one."""
    return tuple(dict.fromkeys((max(POOL_TOKENS, context_limit), context_limit)))


def pools_to_pin(context_limit: int) -> tuple[int, ...]:
    """Every pool that a plan can have, from `roomiest_pool` and `pools_to_try`; largest first."""
    full, *single = pools_to_try(context_limit)
    return (*(times * full for times in POOL_TIMES), full, *single)


def gigabytes(num_bytes: int) -> str:
    """Formats bytes for people: GB with two decimals, or MB below 1 GB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


class LibraryMemory(msgspec.Struct, frozen=True):
    """The memory that an engine's library takes in its process, in bytes, by its own count. active: arrays in use.
    cache: kept for later arrays. peak: the most that was active. limit: the most that it may take; None without a
    limit."""

    source: str
    active_bytes: int
    cache_bytes: int
    peak_bytes: int
    limit_bytes: int | None = None

"""Can rows of several sequences share a forward of a model? Found by building such graphs; nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from exo_mesh_mlx import packets
from exo_mesh_mlx.caches import CacheRows, SequenceCache
from exo_mesh_mlx.ghost import GhostStage
from exo_mesh_mlx.ragged import RaggedMode, attention_by_row, mixers_by_row
from exo_mesh_mlx.whole import WholeStage

TRIED_TOKENS = (1, 3)
"""Per row: a decode step, and one with drafts."""

Stage = GhostStage | WholeStage


def find_mode(stage: Stage, model: nn.Module, new_cache: Callable[[], SequenceCache]) -> RaggedMode | None:
    """Of two ways in which rows can go together the faster one that this model's code allows; None if it allows none.

    The mode is switched on. With None the model is as it was.
    """
    if not all(value.has_batch_axis for value in (*stage.inputs, *stage.outputs)):
        return None
    for make in (attention_by_row, mixers_by_row):
        mode = make(model)
        try:
            if all(_goes_together(stage, new_cache, n) for n in TRIED_TOKENS):
                return mode
        except Exception:  # noqa: BLE001 - model code that is not written for such caches fails in any way
            pass
        mode.switch(False)
    return None


def _goes_together(stage: Stage, new_cache: Callable[[], SequenceCache], n: int) -> bool:
    """Do two rows with caches of different length move in their caches what each moves alone?"""
    short, long, alone = new_cache(), new_cache(), new_cache()
    for cache, num_tokens in ((short, 1), (long, 2), (alone, 1)):
        _run(stage, [cache], num_tokens)
    return _run(stage, [short, long], n) == _run(stage, [alone], n)


def _run(stage: Stage, caches: Sequence[SequenceCache], n: int) -> list[bool]:
    """Which contents of the first cache a forward of n tokens per row exchanges. Raises if the result has no rows."""
    before = caches[0].contents()
    tokens = mx.zeros((len(caches), n), mx.int32)
    result = stage.forward(tokens, CacheRows(caches).full(), packets.zeros(stage.inputs, len(caches), n), n)
    for made in [result] if isinstance(result, mx.array) else result.values():
        if made.shape[0] != len(caches):
            raise ValueError(f"{len(caches)} rows gave {made.shape}")
    for cache in caches:
        cache.advance(n)
    return [_moved(was, now) for was, now in zip(before, caches[0].contents(), strict=True)]


def _moved(was: object, now: object) -> bool:
    return was != now if isinstance(was, int) else was is not now

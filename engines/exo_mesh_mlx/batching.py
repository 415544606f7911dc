"""Finds out whether rows of several sequences can share a forward of a model, by building such graphs and, if need be,
computing a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from exo_mesh_mlx import packets
from exo_mesh_mlx.caches import CacheRows, SequenceCache
from exo_mesh_mlx.ghost import MlxGhostStage
from exo_mesh_mlx.grouping import MIN_POSITIONS
from exo_mesh_mlx.kv import rollback_of
from exo_mesh_mlx.ragged import Offsets, OffsetsAs, RaggedMode, as_array, attention_by_row, mixers_by_row
from exo_mesh_mlx.shared.blocks import KvBlock
from exo_mesh_mlx.whole import WholeStage

TRIED_TOKENS = (1, 3)
"""Tokens per row that are tried: a decode step, and one with drafts."""

TRIED_LENGTHS = (MIN_POSITIONS, MIN_POSITIONS + 1)
"""Positions that the two rows hold before."""

MOST_DIFFERENCE = 0.05
"""Largest difference between the results of a row together and alone, relative to its rms: far above the rounding of
half precision, and far below the effect of a wrong position."""

MOST_SHARING_ERROR = 0.1
"""Largest root mean square of the differences of a row with parts from one without, relative to its rms. Measured on
random models of 7 and 32 layers: 0.016 in bfloat16, and 0.8 without the parts. Attention in pieces rounds at other
places, so the largest of thousands of differences may exceed MOST_DIFFERENCE."""

Stage = MlxGhostStage | WholeStage
NewCache = Callable[[], SequenceCache]


def find_mode(stage: Stage, model: nn.Module, new_cache: NewCache) -> RaggedMode | None:
    """The fastest way to compute rows together that this model's code allows; None if it allows none. The mode is
    switched on. With None the model is unchanged."""
    if not all(value.has_batch_axis for value in (*stage.inputs, *stage.outputs)):
        return None
    for make in (attention_by_row, mixers_by_row):
        for offsets_as in (Offsets, as_array):
            mode = make(model, offsets_as)
            try:
                if all(_goes_together(stage, mode, new_cache, n) for n in TRIED_TOKENS):
                    return mode
            except Exception:  # noqa: BLE001 - model code that is not written for such caches may raise anything
                pass
            mode.switch(False)
    return None


def find_rollback(stage: Stage, new_cache: NewCache) -> tuple[int, bool]:
    """How many of the last positions can be cut back, and whether only to where a row began. None, if the model's code
    gives a token another window beside others than alone: then drafts would change what is drawn."""
    tried = new_cache()
    stage.forward(mx.zeros((1, 2), mx.int32), tried.full, packets.zeros(stage.inputs, 1, 2), 1)
    return (0, False) if tried.pasts.settled.sees_more else rollback_of(tried.full)


def attends_in_blocks(stage: Stage, mode: RaggedMode, new_cache: NewCache) -> bool:
    """Whether the rows of a block can attend in one piece in this mode."""
    try:
        return mode.takes_blocks and all(_goes_together(stage, mode, new_cache, n, in_block=True) for n in TRIED_TOKENS)
    except Exception:  # noqa: BLE001 - model code that is not written for such caches may raise anything
        return False


def attends_to_parts(stage: Stage, mode: RaggedMode, new_cache: NewCache) -> bool:
    """Whether two rows that begin with the same parts get what one without parts gets alone."""
    try:
        return all(_shares(stage, mode, new_cache, n) for n in TRIED_TOKENS)
    except Exception:  # noqa: BLE001 - model code that is not written for such caches may raise anything
        return False


def _shares(stage: Stage, mode: RaggedMode, new_cache: NewCache, n: int) -> bool:
    one, alone = (_after(stage, mode.offsets_as, new_cache, MIN_POSITIONS) for _ in range(2))
    one.part_off(MIN_POSITIONS, MIN_POSITIONS)
    if not one.shares_all():
        return False
    together = [one, one.copied()]
    _, made_by_one = _run(stage, mode.offsets_as, [one.copied()], n)
    _, made_alone = _run(stage, mode.offsets_as, [alone], n)
    KvBlock(one.shareable()).add(together)
    try:
        _, made = _run(stage, mode.offsets_as, together, n)
        mx.eval(made)
    finally:
        for cache in together:
            cache.release()
    pairs = [(got[name][:1], wanted) for name, wanted in made_alone.items() for got in (made, made_by_one)]
    return all(_is_near(got, wanted) for got, wanted in pairs)


def _goes_together(stage: Stage, mode: RaggedMode, new_cache: NewCache, n: int, *, in_block: bool = False) -> bool:
    """Whether two rows with caches of different length change the same cache contents together as alone. If model code
    computes with their offsets, the results are compared, too. in_block: False if they have nothing to share."""
    together = [_after(stage, mode.offsets_as, new_cache, length) for length in TRIED_LENGTHS]
    alone = [_after(stage, mode.offsets_as, new_cache, length) for length in TRIED_LENGTHS]
    if in_block:
        if not (slots := together[0].shareable()):
            return False
        KvBlock(slots).add(together)
    try:
        moved, made = _run(stage, mode.offsets_as, together, n)
    finally:
        for cache in together:
            cache.release()  # it and its block refer to each other
    moved_alone, first = _run(stage, mode.offsets_as, alone[:1], n)
    if moved != moved_alone:
        return False
    if mode.offsets_as is Offsets:
        return True
    _, second = _run(stage, mode.offsets_as, alone[1:], n, row=1)
    return all(_alike(made[name], mx.concatenate([first[name], second[name]])) for name in made)


def _after(stage: Stage, offsets_as: OffsetsAs, new_cache: NewCache, num_tokens: int) -> SequenceCache:
    cache = new_cache()
    _run(stage, offsets_as, [cache], num_tokens)
    return cache


def _run(
    stage: Stage, offsets_as: OffsetsAs, caches: Sequence[SequenceCache], n: int, row: int = 0
) -> tuple[list[bool], dict[Any, mx.array]]:
    """Run a forward of n tokens per row. Returns which contents of the first cache it changed, and its results. The
    rows get the inputs of rows from `row` on. Raises if the result has another number of rows."""
    before = caches[0].contents()
    count = len(caches)
    tokens = mx.array([[1 + (row + i) + j for j in range(n)] for i in range(count)], mx.int32)
    given = {name: _rows_of_noise(array, row) for name, array in packets.zeros(stage.inputs, count, n).items()}
    result = stage.forward(tokens, CacheRows(caches, offsets_as).full(n), given, n)
    made: dict[Any, mx.array] = {"logits": result} if isinstance(result, mx.array) else dict(result)
    for array in made.values():
        if array.shape[0] != count:
            raise ValueError(f"{count} rows gave {array.shape}")
    for cache in caches:
        cache.advance(n)
    return [_moved(was, now) for was, now in zip(before, caches[0].contents(), strict=True)], made


def _rows_of_noise(like: mx.array, row: int) -> mx.array:
    """Random values of the same shape and dtype; the i-th row is the same for any number of rows."""
    rows = [mx.random.normal(like.shape[1:], key=mx.random.key(row + i)) for i in range(like.shape[0])]
    return mx.stack(rows).astype(like.dtype)


def _alike(got: mx.array, want: mx.array) -> bool:
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    worst = mx.max(mx.abs(got - want)) / mx.sqrt(mx.mean(mx.square(want)))
    return bool((worst <= MOST_DIFFERENCE).item())


def _is_near(got: mx.array, want: mx.array) -> bool:
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    error = mx.sqrt(mx.mean(mx.square(got - want)) / mx.mean(mx.square(want)))
    return bool((error <= MOST_SHARING_ERROR).item())


def _moved(was: object, now: object) -> bool:
    return was != now if isinstance(was, int) else was is not now

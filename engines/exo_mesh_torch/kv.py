"""KV of a few sequences in one layer: transformers' cache layers, with room to grow and rows that can be separated.

transformers asks a cache layer for its length and for the size of the mask, and passes keys and values to append. Its
own layers copy all of them with every token. These layers keep them in buffers with room at the end.

Rows of different lengths are padded on the left, as in transformers' own batches: the last position of every row is at
the same place, so appending needs no index per row. `length` counts padded positions.

Rows may begin with parts that other sequences hold too. Positions are then laid out as parts, padding, own positions;
the buffers hold only own positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from exo_mesh.engine.contract import CUT_POSITIONS
from exo_mesh_torch.parts import MOST_DIRECT_TOKENS, KvPart, first_parts, offer, spans

SLACK = 2 * CUT_POSITIONS
"""Positions before its window that a windowed layer keeps, so that rejected drafts can be cut back; twice as many,
because a row that has just been cut back is joined with others, which have not."""

ROOM = 64
"""Least number of positions by which a buffer grows."""


class KvLayer(DynamicLayer):  # type: ignore[misc]
    """Keys `[rows, heads, positions, width]` and values of one attention layer; of the last `window` positions if set.

    A layer of another stage never gets any: it only counts positions, so that masks made from it are right.
    """

    is_croppable = False

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.is_sliding = window is not None
        self.is_initialized = False
        self.length = 0
        self.kept = 0
        self._fill = 0
        self._buffers: list[torch.Tensor] = []
        self._parts: list[tuple[KvPart, ...]] = []
        """The parts that each row begins with; empty if no row has any."""

    @property
    def keys(self) -> torch.Tensor | None:
        return self._whole(0) if self._buffers else None

    @property
    def values(self) -> torch.Tensor | None:
        return self._whole(1) if self._buffers else None

    @property
    def reach(self) -> int:
        """The number of past positions that the next token sees."""
        return self.length if self.window is None else min(self.length, self.window - 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append n positions; returns the keys and values that they may attend to."""
        num_tokens, visible = key_states.shape[-2], self.reach + key_states.shape[-2]
        self._make_room(num_tokens, (key_states, value_states))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer.narrow(2, self._fill, num_tokens).copy_(states)
        self._fill += num_tokens
        self.kept += num_tokens
        self.length += num_tokens
        if self._parts and num_tokens > MOST_DIRECT_TOKENS:
            return self._whole(0), self._whole(1)
        if self._parts:
            keys, values = self._last(0, self.kept), self._last(1, self.kept)
            offer(keys, spans(self._parts))
            return keys, values
        return self._last(0, visible), self._last(1, visible)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.reach + query_length, self.length - self.reach

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def skip(self, num_tokens: int) -> None:
        """Count the positions of a forward that this layer took no part in."""
        self.length += num_tokens

    def can_cut(self, surplus: int) -> bool:
        """Whether the next token can still see enough positions after dropping the last `surplus` ones."""
        if not self._buffers:
            return surplus <= self.length
        after = self.length - surplus
        needed = after if self.window is None else min(after, self.window - 1)
        return bool(self._parts) or self.kept - surplus >= needed

    def can_cut_positions(self, surplus: int) -> bool:
        """The same for all but recurrent states."""
        return KvLayer.can_cut(self, surplus)

    def cut(self, surplus: int) -> None:
        self.length -= surplus
        if self._buffers:
            self.kept -= surplus
            self._fill -= surplus

    def tensors(self) -> Iterator[torch.Tensor]:
        """The buffers and parts, by their memory."""
        yield from self._buffers
        for parts in list(self._parts):
            yield from (tensor for part in parts for tensor in part.tensors)

    def row(self, index: int, length: int) -> KvLayer:
        """A copy of one row, which holds `length` positions, without its padding. Its parts are not copied."""
        copy = self.fresh()
        copy.length = length
        if self._buffers:
            kept = min(self.kept, length - self.shared(index))
            copy._set([self._last(i, kept)[index : index + 1] for i in range(2)])
            copy._parts = self._parts[index : index + 1] if self.shared(index) else []
        return copy

    def shared(self, index: int) -> int:
        """Positions of a row that are in parts."""
        return sum(part.length for part in self._parts[index]) if self._parts else 0

    def parts(self, index: int) -> tuple[KvPart, ...]:
        return self._parts[index] if self._parts else ()

    @property
    def can_share(self) -> bool:
        """Whether its positions can be in parts: a window would be counted over the padding behind them."""
        return type(self) is KvLayer and self.window is None

    def part_off(self, count: int) -> None:
        """Make a part of the first `count` own positions of its one row."""
        if self._buffers:
            part = KvPart(*(self._last(i, self.kept)[:, :, :count].clone() for i in range(2)))
            parts = self._parts[0] if self._parts else ()
            self._set([self._last(i, self.kept - count) for i in range(2)])
            self._parts = [(*parts, part)]

    def begin(self, index: int, held: int, length: int) -> KvLayer:
        """A layer of one row with the first `length` of the `held` positions of a row; its parts are not copied, nor is
        the first piece of a part, if it is long."""
        copy = self.fresh()
        copy.length = length
        if self._buffers:
            parts = first_parts(self._parts[index], length) if self._parts else ()
            at = sum(part.length for part in parts)
            copy._set([self._one(i, index, held, at)[:, :, : length - at] for i in range(2)], room=0)
            copy._parts = [parts] if parts else []
        return copy

    def own(self) -> None:
        """Take all positions of its one row into its own buffers."""
        if self._parts:
            tensors = [self._whole(i) for i in range(2)]
            self._parts = []
            self._set(tensors)

    def join(self, others: Sequence[KvLayer], length: int = 0) -> KvLayer:
        """One layer with this layer's row and the rows of the others. All hold one row. length: padded positions; 0:
        those of the longest row."""
        parts = [self, *others]
        joined = self.fresh()
        joined.length = length or max(part.length for part in parts)
        if any(part._parts for part in parts):
            own = max(part.kept for part in parts)
            joined._set([_right_aligned([part._last(i, part.kept) for part in parts], own) for i in range(2)])
            joined._parts = [part._parts[0] if part._parts else () for part in parts]
        elif self._buffers:
            kept = min([joined.length, *(part.kept for part in parts if part.kept < part.length)])
            joined._set(
                [_right_aligned([part._last(i, min(kept, part.kept)) for part in parts], kept) for i in range(2)]
            )
        return joined

    def fresh(self) -> KvLayer:
        """An empty layer of the same kind."""
        return type(self)(self.window)

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that a save of its one row must hold."""
        return {} if not self._buffers else {"keys": self._whole(0)[0], "values": self._whole(1)[0]}

    def set_state(self, length: int, state: dict[str, torch.Tensor]) -> None:
        """Restore the tensors of `state`, `[heads, positions, width]` each."""
        self.length = length
        if state:
            self._set([state["keys"][None], state["values"][None]])

    def _set(self, tensors: Sequence[torch.Tensor], room: int = ROOM) -> None:
        self.kept = self._fill = tensors[0].shape[2]
        self._buffers = [_with_room(tensor, self.kept, self.kept + room) for tensor in tensors]
        self.is_initialized = True

    def _whole(self, which: int) -> torch.Tensor:
        """All kept positions; of one row if it has parts."""
        return self._one(which, 0, self.length) if self._parts else self._last(which, self.kept)

    def _one(self, which: int, index: int, held: int, start: int = 0) -> torch.Tensor:
        """The kept positions of a row that holds so many, from `start` on, `[1, heads, positions, width]`. start: the
        end of one of its parts, or within one."""
        pieces, at = [], 0
        for part in self.parts(index):
            if start < at + part.length:
                pieces.append(part.tensors[which][:, :, max(0, start - at) :])
            at += part.length
        own = self._last(which, min(self.kept, held - at))[index : index + 1]
        return torch.cat([*pieces, own], 2) if pieces else own

    def _last(self, which: int, count: int) -> torch.Tensor:
        return self._buffers[which].narrow(2, self._fill - count, count)

    def _make_room(self, num_tokens: int, like: tuple[torch.Tensor, torch.Tensor]) -> None:
        if not self._buffers:
            self.is_initialized = True
            self._buffers = [_empty_like(states, num_tokens + ROOM) for states in like]
        elif self._fill + num_tokens > self._buffers[0].shape[2]:
            keep = self.kept if self.window is None else min(self.kept, self.window - 1 + SLACK)
            capacity = keep + num_tokens + max(ROOM, keep // 4)
            self._buffers = [_with_room(self._last(i, keep), keep, capacity) for i in range(2)]
            self._fill = self.kept = keep


class RecurrentLayer(LinearAttentionLayer):  # type: ignore[misc]
    """The states of one recurrent layer, of the same size at any length. They cannot be cut back, but a row can return
    to a state that was copied."""

    def skip(self, num_tokens: int) -> None:
        self.has_previous_state: dict[int, bool] = dict.fromkeys(range(self.number_of_states), True)

    def can_cut(self, surplus: int) -> bool:
        return not any(True for _ in self.recurrent_tensors())

    def can_cut_positions(self, surplus: int) -> bool:
        return True

    def cut(self, surplus: int) -> None:
        """Do nothing: there are no positions."""

    def copy_states(self, index: int) -> dict[str, torch.Tensor]:
        """The states of one row now."""
        return {name: tensor[index].clone() for name, tensor in self._named().items()}

    def return_to(self, index: int, states: dict[str, torch.Tensor]) -> None:
        """Set the states of one row to what `copy_states` gave."""
        named = self._named()
        for name, state in states.items():
            named[name][index].copy_(state)

    def recurrent_tensors(self) -> Iterator[torch.Tensor]:
        for states in (self.conv_states, self.recurrent_states):
            yield from (tensor for tensor in states.values() if tensor is not None)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.recurrent_tensors()

    def row(self, index: int, length: int) -> RecurrentLayer:
        copy = self.fresh()
        copy._take({name: tensor[index : index + 1].clone() for name, tensor in self._named().items()}, self)
        return copy

    def join(self, others: Sequence[RecurrentLayer], length: int = 0) -> RecurrentLayer:
        joined = self.fresh()
        named = [part._named() for part in (self, *others)]
        joined._take({name: torch.cat([part[name] for part in named]) for name in named[0]}, self)
        return joined

    def fresh(self) -> RecurrentLayer:
        return type(self)(number_of_states=self.number_of_states)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor[0] for name, tensor in self._named().items()}

    def set_state(self, length: int, state: dict[str, torch.Tensor]) -> None:
        # transformers continues by the kernel's length; a whole state always has it
        sizes = {int(name[4:]): tensor.shape[-1] for name, tensor in state.items() if name.startswith("conv")}
        self.conv_kernel_size: dict[int, int | None] = {**dict.fromkeys(range(self.number_of_states)), **sizes}
        self._fill_in({name: tensor[None].clone() for name, tensor in state.items()})
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), length > 0)

    def _named(self) -> dict[str, torch.Tensor]:
        kinds = {"conv": self.conv_states, "state": self.recurrent_states}
        return {f"{kind}{i}": t for kind, states in kinds.items() for i, t in states.items() if t is not None}

    def _take(self, tensors: dict[str, torch.Tensor], like: RecurrentLayer) -> None:
        self._fill_in(tensors)
        self.conv_kernel_size = dict(like.conv_kernel_size)
        self.has_previous_state = dict(like.has_previous_state)

    def _fill_in(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.device, self.dtype = tensor.device, tensor.dtype
            if name.startswith("conv"):
                self.conv_states[int(name[4:])] = tensor
                self.is_conv_states_initialized[int(name[4:])] = True
            else:
                self.recurrent_states[int(name[5:])] = tensor
                self.is_recurrent_states_initialized[int(name[5:])] = True


class HybridLayer(RecurrentLayer, KvLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A layer with both kinds of cache. Each part works for itself; transformers calls them by different methods."""

    is_compileable = False

    def __init__(self, window: int | None = None, number_of_states: int = 1) -> None:
        KvLayer.__init__(self, window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def skip(self, num_tokens: int) -> None:
        RecurrentLayer.skip(self, num_tokens)
        KvLayer.skip(self, num_tokens)

    def can_cut(self, surplus: int) -> bool:
        return RecurrentLayer.can_cut(self, surplus) and KvLayer.can_cut(self, surplus)

    def cut(self, surplus: int) -> None:
        KvLayer.cut(self, surplus)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self._buffers
        yield from self.recurrent_tensors()

    def row(self, index: int, length: int) -> HybridLayer:
        copy: Any = KvLayer.row(self, index, length)
        copy._take({name: tensor[index : index + 1].clone() for name, tensor in self._named().items()}, self)
        hybrid: HybridLayer = copy
        return hybrid

    def join(self, others: Sequence[Any], length: int = 0) -> HybridLayer:
        joined: Any = KvLayer.join(self, others, length)
        named = [part._named() for part in (self, *others)]
        joined._take({name: torch.cat([part[name] for part in named]) for name in named[0]}, self)
        hybrid: HybridLayer = joined
        return hybrid

    def fresh(self) -> HybridLayer:
        return HybridLayer(self.window, self.number_of_states)

    def state(self) -> dict[str, torch.Tensor]:
        return {**KvLayer.state(self), **RecurrentLayer.state(self)}

    def set_state(self, length: int, state: dict[str, torch.Tensor]) -> None:
        attention = {name: tensor for name, tensor in state.items() if name in ("keys", "values")}
        KvLayer.set_state(self, length, attention)
        RecurrentLayer.set_state(self, length, {name: t for name, t in state.items() if name not in attention})


class NoLayer(DummyLayer):  # type: ignore[misc]
    """A layer that keeps nothing."""

    def can_cut_positions(self, surplus: int) -> bool:
        return True

    def skip(self, num_tokens: int) -> None:
        """Do nothing: there is nothing to count."""

    def can_cut(self, surplus: int) -> bool:
        return True

    def cut(self, surplus: int) -> None:
        """Do nothing: there is nothing to drop."""

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from ()

    def row(self, index: int, length: int) -> NoLayer:
        return NoLayer()

    def join(self, others: Sequence[NoLayer], length: int = 0) -> NoLayer:
        return NoLayer()

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def set_state(self, length: int, state: dict[str, torch.Tensor]) -> None:
        """Do nothing: there is nothing to restore."""


def is_recurrent(layer: Any) -> bool:
    """Whether a layer keeps a state of constant size."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def _empty_like(states: torch.Tensor, capacity: int) -> torch.Tensor:
    rows, heads, _, width = states.shape
    return torch.empty((rows, heads, capacity, width), dtype=states.dtype, device=states.device)


def _with_room(states: torch.Tensor, length: int, capacity: int) -> torch.Tensor:
    """A buffer that begins with `states`."""
    buffer = _empty_like(states, capacity)
    buffer.narrow(2, 0, length).copy_(states)
    return buffer


def _right_aligned(parts: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """Rows of different lengths as one tensor, with zeros before the shorter ones.

    They must be zeros: masked positions are still multiplied, and 0 * NaN is NaN.
    """
    first = parts[0]
    joined = first.new_zeros((len(parts), first.shape[1], length, first.shape[3]))
    for index, part in enumerate(parts):
        joined[index, :, length - part.shape[2] :] = part[0]
    return joined

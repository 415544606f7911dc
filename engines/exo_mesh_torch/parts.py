"""Keys and values that several sequences begin with, held once, and attention over them without putting them together.

Rows of a batch that begin with the same part attend to it in one product. Its result and the result over a row's own
positions are combined by the logarithms of their sums of exponentials, as flash attention combines its blocks.

A cache layer passes its own keys to transformers' attention function, and leaves the parts here for it: `offer` and
`taken` check that the function gets exactly these keys, so that no model computes without the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from exo_mesh.engine.contract import LEAST_SHARED
from exo_mesh.errors import EngineError

MOST_DIRECT_TOKENS = 16
"""Longest row whose attention goes part by part. A longer row is alone in its batch, and gets all keys in one tensor:
that costs little beside its products."""


_serials = count()


class KvPart:
    """Keys and values `[1, heads, length, width]` of some positions in one layer. They never change."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.tensors = (keys, values)
        self.length = int(keys.shape[2])
        self.serial = next(_serials)
        self._starts: WeakValueDictionary[int, KvPart] = WeakValueDictionary()

    def start(self, length: int) -> KvPart:
        """The first positions, in the same memory; the same object for the same length."""
        if length == self.length:
            return self
        found = self._starts.get(length)
        if found is None:
            found = self._starts[length] = KvPart(*(tensor.narrow(2, 0, length) for tensor in self.tensors))
        return found


class PartSpan(NamedTuple):
    """A part with the rows `[first, stop)` of a batch that begin with it, or have it behind other parts."""

    part: KvPart
    first: int
    stop: int


def spans(parts_of: Sequence[tuple[KvPart, ...]]) -> list[PartSpan]:
    """The parts of all rows of a batch, each once for rows side by side."""
    found: list[PartSpan] = []
    for depth in range(max((len(parts) for parts in parts_of), default=0)):
        first = 0
        while first < len(parts_of):
            part, stop = _at(parts_of[first], depth), first + 1
            while stop < len(parts_of) and _at(parts_of[stop], depth) is part:
                stop += 1
            if part is not None:
                found.append(PartSpan(part, first, stop))
            first = stop
    return found


def _at(parts: tuple[KvPart, ...], depth: int) -> KvPart | None:
    return parts[depth] if depth < len(parts) else None


def first_parts(parts: Sequence[KvPart], length: int) -> tuple[KvPart, ...]:
    """The parts of the first `length` positions, the last one cut off if enough of it is left; perhaps not all of these
    positions."""
    found: list[KvPart] = []
    at = 0
    for part in parts:
        if at + part.length > length:
            if length - at >= LEAST_SHARED:
                found.append(part.start(length - at))
            break
        found.append(part)
        at += part.length
    return tuple(found)


class _Offer:
    """The parts for the next attention, and the keys that it must get."""

    keys: torch.Tensor | None = None
    spans: Sequence[PartSpan] = ()


_offer = _Offer()


def offer(keys: torch.Tensor, found: Sequence[PartSpan]) -> None:
    """Leave parts for the next attention function, which gets `keys` as its keys. Raises EngineError if the last offer
    was not taken."""
    check_taken()
    _offer.keys, _offer.spans = keys, found


def check_taken() -> None:
    """Raises EngineError if an attention was computed without its parts."""
    if _offer.keys is not None:
        withdraw()
        raise EngineError("the attention of this model cannot take shared parts")


def withdraw() -> None:
    """Forget an offer, after an error."""
    _offer.keys, _offer.spans = None, ()


def install() -> None:
    """Let transformers' sdpa attention take the parts that a cache layer offers. Calls without an offer are as
    before."""
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if original is not _attention:
        _original.append(original)
        ALL_ATTENTION_FUNCTIONS.register("sdpa", _attention)


_original: list[Any] = []
_OTHER_SCORES = ("softcap", "s_aux", "position_bias")
"""Arguments of attention functions that change scores; parts do not know them."""


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """In place of transformers' sdpa_attention_forward."""
    if _offer.keys is None:
        result: tuple[torch.Tensor, None] = _original[-1](module, query, key, value, attention_mask, **kwargs)
        return result
    if key is not _offer.keys or any(kwargs.get(name) is not None for name in _OTHER_SCORES):
        check_taken()
    found = _offer.spans
    withdraw()
    scale = kwargs.get("scaling")
    output = attend(query, key, value, attention_mask, found, query.shape[-1] ** -0.5 if scale is None else scale)
    return output.transpose(1, 2).contiguous(), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    found: Sequence[PartSpan],
    scale: float,
) -> torch.Tensor:
    """Attention of the last n positions of each row, `[rows, query_heads, n, width]`. key, value: the rows' own
    positions, `[rows, kv_heads, own, width]`, with the shorter ones on the right. mask: bool or added to scores,
    `[rows, 1, n, positions]`, whose last columns are the own positions."""
    rows, heads, n, width = query.shape
    grouped = query.reshape(rows, key.shape[1], -1, width)  # heads with the same keys side by side
    output, lse = _scored(grouped, key, value, _own_mask(mask, query, key, grouped.shape[2] // n), scale)
    for part, first, stop in found:
        keys, values = part.tensors
        joint = grouped[first:stop].transpose(0, 1).reshape(1, key.shape[1], -1, width)
        more, more_lse = _scored(joint, keys, values, None, scale)
        more = more.view(key.shape[1], stop - first, -1, more.shape[-1]).transpose(0, 1)
        more_lse = more_lse.view(key.shape[1], stop - first, -1).transpose(0, 1)
        share = torch.sigmoid(more_lse - lse[first:stop])[..., None]
        output[first:stop].lerp_(more, share)
        lse[first:stop] = torch.logaddexp(lse[first:stop], more_lse)
    return output.to(query.dtype).reshape(rows, heads, n, -1)


def _own_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, group: int) -> torch.Tensor | None:
    """The mask of the own positions, `[rows, 1, group * n, own]`, added to scores."""
    n, own = query.shape[2], key.shape[2]
    if mask is None:
        if n == 1:
            return None
        mask = torch.ones((1, 1, n, own), dtype=torch.bool, device=query.device).tril(own - n)
    mask = mask[..., mask.shape[-1] - own :]
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, float("-inf"))
    return mask.repeat(1, 1, group, 1)


def _scored(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention `[rows, heads, n, width]` and the logarithm of the sum of exponentials of its scores `[rows, heads,
    n]`, float32."""
    if query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = flash(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
        return output.float(), lse
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp().to(value.dtype) @ value).float(), lse

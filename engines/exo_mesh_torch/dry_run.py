"""Finds the cuts that hold for several frames, by running three frames on the meta device, whole and from each cut on.

Model code makes its masks outside the layers, from the cache of a layer that it picks, often the first one. On a stage
without that layer the mask can have another size from the second frame on. So a stage's first layer must get the same
shapes as in the whole model, and must end in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from exo_mesh_torch.caches import CachePlan, StageCache, States
from exo_mesh_torch.calls import call_arguments, get_hidden
from exo_mesh_torch.kv import KvLayer, NoLayer, is_recurrent
from exo_mesh_torch.trace import TorchTrace, find_layers

FRAMES = (7, 3, 1)
"""Tokens of the frames: a prompt in two chunks and a decode step. Many models make no mask for a single token."""

MOST_DIFFERENCE = 0.05
"""Largest difference of a recurrent state, relative to its largest value: far above the rounding of half precision."""

Seen = tuple[str, ...]
"""The inputs of a layer in one frame: the shapes of its tensors; last, how its call ended."""


class _DryRunEnd(Exception):
    """Not an error: the stage's last layer is done."""


def broken_cuts(model: nn.Module, trace: TorchTrace, plan: CachePlan) -> dict[int, str]:
    """The trace's legal cuts before which no stage may begin, with the reasons."""
    if not trace.legal_cuts:
        return {}
    run = _DryRun(model, trace, plan)
    whole = run.frames(range(trace.num_layers))
    broken = {}
    for cut in trace.legal_cuts:
        alone = run.frames(range(cut, cut + 1))
        for frame, expected in enumerate(whole):
            got = alone[frame].get(cut) if frame < len(alone) else None
            if got != expected.get(cut):
                broken[cut] = _difference(cut, frame, got, expected.get(cut))
                break
    return broken


def takes_up_states(run: Callable[[int, int], object], states: Callable[[], States]) -> bool:
    """Whether a row of several tokens goes on from the recurrent states before it, as single tokens do: some model code
    begins with empty states. run: computes (pos0, n) of a sequence. states: copies those that it has now."""
    found: list[list[torch.Tensor]] = []
    for sizes in ((4, 2), (4, 1, 1)):
        for index, n in enumerate(sizes):
            run(sum(sizes[:index]), n)
        found.append([state.float() for one in states().values() for state in one.values()])
    return all((got - want).abs().max() <= MOST_DIFFERENCE * want.abs().max() for got, want in zip(*found, strict=True))


def _difference(cut: int, frame: int, got: Seen | None, expected: Seen | None) -> str:
    where = f"layer {cut} as the first of a stage gets other inputs than in the whole model in frame {frame + 1}"
    if got is None or expected is None:
        return f"{where}: the code around the layers fails there"
    other = next((pair for pair in zip(got, expected, strict=False) if pair[0] != pair[1]), None)
    return f"{where}: {other[0]} instead of {other[1]}" if other else f"{where}: other tensors"


class _DryRun:
    """Runs a range of a model's layers over FRAMES. Of equal layers only the first is called."""

    def __init__(self, model: nn.Module, trace: TorchTrace, plan: CachePlan) -> None:
        self._model, self._trace, self._plan = model, trace, plan
        _, self._layers = find_layers(model, trace.num_layers)

    def frames(self, mine: range) -> list[dict[int, Seen]]:
        """The inputs of the layers in `mine`, frame by frame, up to the first frame in which the code around them
        fails."""
        cache = self._plan.new()
        called = [index for index in mine if self._trace.layers[index].like == index]
        others = [index for index in range(self._trace.num_layers) if index not in called]
        frames: list[dict[int, Seen]] = []
        length = 0
        for num_tokens in FRAMES:
            seen: dict[int, Seen] = {}
            before = {index: _length(cache, index) for index in called}
            if not self._frame(cache, mine, length, num_tokens, seen):
                break
            # a layer that fails on shapes may do so before its attention
            failed = [index for index in called if seen[index][-1] and _length(cache, index) == before[index]]
            cache.skip([*others, *failed], num_tokens)
            length += num_tokens
            frames.append(seen)
        return frames

    def _frame(self, cache: StageCache, mine: range, length: int, num_tokens: int, seen: dict[int, Seen]) -> bool:
        """Run one forward over zeros; False if the code around the layers failed. Fills `seen`."""
        device = torch.device("meta")
        ids = torch.zeros((1, num_tokens), dtype=torch.long, device=device)
        positions = torch.arange(length, length + num_tokens, device=device)[None]
        for index, layer in enumerate(self._layers):
            layer.forward = self._noted(index, layer.forward, mine, seen)
        try:
            with torch.no_grad():
                self._model(input_ids=ids, **call_arguments(self._model, cache, position_ids=positions))
        except _DryRunEnd:
            return True
        except Exception:  # noqa: BLE001 - model code may raise anything; heads that read values cannot run on shapes
            return mine[-1] in seen
        finally:
            for layer in self._layers:
                del layer.forward
        return True

    def _noted(self, index: int, original: Any, mine: range, seen: dict[int, Seen]) -> Any:
        """A layer's forward that records its inputs; a ghost's outside of `mine`."""
        use = self._trace.layers[index]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if index >= mine.stop:
                raise _DryRunEnd
            hidden = get_hidden(args, kwargs)
            if index in mine:
                given, ended = _shapes(args, kwargs), ""
                if use.like == index:
                    try:
                        original(*args, **kwargs)
                    except Exception as exc:  # noqa: BLE001 - some layers read values, such as expert routers
                        ended = f"{type(exc).__name__}: {exc}"
                seen[index] = (*given, ended)
            return (hidden, *[None] * (use.returns - 1)) if use.returns else hidden

        return forward


def _length(cache: StageCache, index: int) -> int:
    """Positions that a layer has counted; 0 for a layer that keeps only a state, or nothing."""
    layer = cache.layers[index]
    counts = isinstance(layer, KvLayer) or not (is_recurrent(layer) or isinstance(layer, NoLayer))
    return int(layer.get_seq_length()) if counts else 0


def _shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Seen:
    found = []
    for name, value in (*((str(i), arg) for i, arg in enumerate(args)), *kwargs.items()):
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, torch.Tensor):
                found.append(f"{name} of shape {list(item.shape)}")
    return tuple(found)

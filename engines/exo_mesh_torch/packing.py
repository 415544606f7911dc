"""Weights of linear layers in the order in which oneDNN multiplies them.

On a CPU a linear layer of torch reads its weights in the checkpoint's order, and for the few rows of a decode step that
is slow: measured with one thread of an AMD EPYC and 8 rows, 4 GB/s in bfloat16 and 2 in float32. With weights that were
reordered once it is 17 and 9, and for one row 25, which is the limit of the memory
(docs/measurements/many-requests.md).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from exo_mesh.errors import InputError

ROWS = 8
"""Number of rows that the order is chosen for; it is as good for one row, and no worse than the plain order for a
prompt."""

MIN_ELEMENTS = 2**18
"""Smaller weights stay in the cache of a core, whatever their order."""

_PACKED = {torch.float32, torch.bfloat16}


def wants_packing(options: Mapping[str, str], device: torch.device) -> bool:
    """Option `packed`: on (if torch can do it: on the CPU of a PC) or off, the default: loading then takes up to 1.7
    times the stage's memory for a moment, while plans count on 1.15. Raises InputError."""
    wanted = options.get("packed", "off")
    able = device.type == "cpu" and platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()
    if wanted == "on" and not able:
        raise InputError(
            f"option packed=on: torch cannot pack weights on {device.type} of this machine", param="packed"
        )
    return able and wanted == "on"


class PackedLinears:
    """The linear layers of a stage that were packed, in place: each keeps its weights only in oneDNN's order, from the
    moment that they are loaded; otherwise the stage would need its memory twice.

    None replaces the plain weights, so that code which uses a layer's weights directly, and not by calling the layer,
    fails; `unpack` then restores everything.
    """

    def __init__(self) -> None:
        self._layers: list[tuple[nn.Linear, _Packed]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all packed weights."""
        return sum(packed.num_bytes for _, packed in self._layers)

    def unpack(self) -> None:
        """Restore plain weights and torch's own kernels."""
        for linear, packed in self._layers:
            vars(linear).pop("forward", None)
            linear.weight = nn.Parameter(packed.weight.to_dense().contiguous(), requires_grad=False)
        self._layers.clear()

    def pack(self, module: nn.Module) -> bool:
        """Pack a layer whose weight, its own alone, has been loaded; False if it stays as it is."""
        if type(module) is not nn.Linear or not _is_large(module.weight):
            return False
        packed = _Packed(module)
        module.register_parameter("weight", None)
        module.forward = packed
        self._layers.append((module, packed))
        return True


class _Packed:
    """A linear layer with packed weights: `[…, in]` -> `[…, out]`, as nn.Linear."""

    __slots__ = ("_linear", "num_bytes", "weight")

    def __init__(self, linear: nn.Linear) -> None:
        self.weight: Any = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.num_bytes = linear.weight.nbytes
        self._linear = linear

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        linear, shape = self._linear, (*states.shape[:-1], self._linear.out_features)
        rows = states.reshape(-1, linear.in_features).contiguous()
        if not len(rows):
            return states.new_empty(shape)
        result: Any = torch.ops.mkldnn._linear_pointwise(rows, self.weight, linear.bias, "none", [], "")
        return result.reshape(shape)


def _is_large(weight: torch.Tensor) -> bool:
    """Whether a weight is of this stage, large enough, and of a dtype that this CPU can reorder."""
    if weight.is_meta or weight.numel() < MIN_ELEMENTS:
        return False
    return weight.dtype in _PACKED and _can_reorder(weight.dtype)


@cache
def _can_reorder(dtype: torch.dtype) -> bool:
    """Whether oneDNN reorders weights of a dtype on this CPU: for bfloat16 it needs AVX-512, and raises without it."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros((16, 16), dtype=dtype), ROWS)
    except RuntimeError:
        return False
    return True

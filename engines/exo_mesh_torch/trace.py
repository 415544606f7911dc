"""Traces how a model's forward pass uses its layers, on the meta device: shapes only, no weights, nothing computed.

The model's own code runs over the whole model, with every layer watched. That shows the inputs and outputs of a stage,
and which of the other modules belong before or behind the layers. It also shows whether any value besides the hidden
state goes from layer to layer, so that the model cannot be cut there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from exo_mesh.errors import ModelError
from exo_mesh_torch.caches import CachePlan, StageCache
from exo_mesh_torch.calls import call_arguments, get_hidden
from exo_mesh_torch.errors import one_line

RUN_TOKENS = 7
"""Unlike the size of any other axis that comes before the tokens."""


class TorchLayerUse(msgspec.Struct, frozen=True):
    """The behaviour of one layer. returns: number of values if the layer returns a tuple, the hidden state first; 0 for
    a plain tensor. like: the first layer with the same code and shapes; only its cache was filled."""

    returns: int
    like: int


class TorchTrace(msgspec.Struct, frozen=True):
    """The trace of a model. hidden_shape, hidden_dtype: of one token of the hidden state between layers. streams:
    whether an axis of parallel hidden states comes before rows and tokens. reason: why a model without legal_cuts has
    none.

    first, last: parameters used only before the first and only behind the last layer; everywhere: those that every
    stage needs. caches: a cache that the run has filled, whose shapes are those of the real one.
    """

    prefix: str
    layers: tuple[TorchLayerUse, ...]
    hidden_shape: tuple[int, ...]
    hidden_dtype: torch.dtype
    streams: bool
    legal_cuts: tuple[int, ...]
    reason: str
    first: frozenset[str]
    last: frozenset[str]
    everywhere: frozenset[str]
    caches: StageCache

    @property
    def num_layers(self) -> int:
        return len(self.layers)


class _RunWatch(msgspec.Struct):
    """The results of one run so far. tainted: layers that get values computed from other modules' parameters."""

    next_layer: int = 0
    order_kept: bool = True
    returns: dict[int, int] = msgspec.field(default_factory=dict)
    hidden_shape: tuple[int, ...] = ()
    hidden_dtype: torch.dtype | None = None
    tainted: bool = False
    side_values: bool = False
    extras: list[torch.Tensor] = msgspec.field(default_factory=list)
    like: dict[int, int] = msgspec.field(default_factory=dict)
    returns_of: dict[type, int] = msgspec.field(default_factory=dict)
    writers: set[int] = msgspec.field(default_factory=set)
    before: set[str] = msgspec.field(default_factory=set)
    between: set[str] = msgspec.field(default_factory=set)
    behind: set[str] = msgspec.field(default_factory=set)


def find_layers(model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers and its name. Raises ModelError if there is no list of that length."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not found:
        raise ModelError(
            f"the torch engine cannot run {type(model).__name__}: it has no list of {num_layers} layers that run one "
            "after the other"
        )
    return min(found, key=lambda item: item[0].count("."))


def trace_model(model: nn.Module, num_layers: int, plan: CachePlan) -> TorchTrace:
    """Trace a model. Raises ModelError if the forward pass does not run on the meta device with a StageCache."""
    prefix, layers = find_layers(model, num_layers)
    own = {id(parameter): name for name, parameter in model.named_parameters() if not name.startswith(prefix + ".")}
    cache = plan.new()
    kinds = _first_alike(layers, plan)
    direct = _run(model, layers, cache, own, _RunWatch(like=kinds), from_layers=False)
    known = _RunWatch(like=kinds, returns=dict(direct.returns))
    through = _run(model, layers, plan.new(), own, known, from_layers=True)
    if len(direct.returns) != num_layers:
        raise ModelError(
            f"the torch engine cannot run {type(model).__name__}: it calls {len(direct.returns)} of its {num_layers} "
            "layers"
        )
    cuts, reason = _legal_cuts(direct, through, num_layers)
    streams = direct.hidden_shape[:2] != (1, RUN_TOKENS)
    unseen = set(own.values()) - direct.before - direct.between - direct.behind
    everywhere = unseen | direct.between | (direct.before if direct.tainted else set())
    return TorchTrace(
        prefix=prefix,
        layers=tuple(TorchLayerUse(direct.returns[i], kinds[i]) for i in range(num_layers)),
        hidden_shape=direct.hidden_shape[2:] if not streams else (direct.hidden_shape[0], *direct.hidden_shape[3:]),
        hidden_dtype=direct.hidden_dtype or torch.float32,
        streams=streams,
        legal_cuts=cuts,
        reason=reason,
        first=frozenset(direct.before - everywhere),
        last=frozenset(direct.behind - everywhere),
        everywhere=frozenset(everywhere),
        caches=cache,
    )


def _legal_cuts(direct: _RunWatch, through: _RunWatch, num_layers: int) -> tuple[tuple[int, ...], str]:
    if not direct.order_kept:
        return (), "its layers are not called once each, in order"
    if direct.side_values or through.side_values:
        return (), "its layers pass on more than one value"
    first_writer = min(direct.writers | through.writers, default=num_layers)
    cuts = tuple(range(1, min(first_writer, num_layers - 1) + 1))
    return cuts, "" if cuts else "a value of its first layer is used by later ones"


def _first_alike(layers: nn.ModuleList, plan: CachePlan) -> dict[int, int]:
    """For each layer the first one of the same class, parameters and cache."""
    seen: dict[Any, int] = {}
    alike = {}
    for index, layer in enumerate(layers):
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in layer.state_dict().items())
        classes = tuple(type(module) for module in layer.modules())
        alike[index] = seen.setdefault((classes, shapes, plan.kinds[index]), index)
    return alike


def _run(
    model: nn.Module,
    layers: nn.ModuleList,
    cache: StageCache,
    own: dict[int, str],
    watch: _RunWatch,
    *,
    from_layers: bool,
) -> _RunWatch:
    """Run one forward over zeros. Values are followed by their gradients, which begin at parameters outside the layers,
    or at the results of layers; only in the first case do the layers run themselves."""
    hooks = [module.register_forward_pre_hook(_note_use(watch, own, layers, module)) for module in _owners(model, own)]
    for parameter in model.parameters():
        parameter.requires_grad_(not from_layers and id(parameter) in own)
    for index, layer in enumerate(layers):
        layer.forward = _watched(watch, index, layer, from_layers=from_layers)
    device = torch.device("meta")
    ids = torch.zeros((1, RUN_TOKENS), dtype=torch.long, device=device)
    positions = torch.arange(RUN_TOKENS, device=device)[None]
    try:
        with torch.enable_grad():
            model(input_ids=ids, **call_arguments(model, cache, position_ids=positions))
    except ModelError:
        raise
    except Exception as exc:  # model code may raise anything
        # after the layers errors do not matter: heads that read values cannot run on shapes
        if watch.next_layer < len(layers):
            raise ModelError(
                f"the torch engine cannot run {type(model).__name__}: its code in transformers needs values where only "
                f"shapes are known ({type(exc).__name__}: {one_line(exc)})"
            ) from exc
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers:
            del layer.forward
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    return watch


def _owners(model: nn.Module, own: dict[int, str]) -> Iterator[nn.Module]:
    """Modules outside the layers that hold parameters themselves."""
    for module in model.modules():
        if any(id(parameter) in own for parameter in module.parameters(recurse=False)):
            yield module


def _note_use(watch: _RunWatch, own: dict[int, str], layers: nn.ModuleList, owner: nn.Module) -> Any:
    """A hook that records a module's parameters as used. A module around the layers may use its parameters at any time
    during its call."""
    around = any(module is layers for module in owner.modules())

    def hook(module: nn.Module, _args: Any) -> None:
        names = {own[id(p)] for p in module.parameters(recurse=False) if id(p) in own}
        if around or 0 < watch.next_layer < len(layers):
            watch.between |= names
        elif watch.next_layer == 0:
            watch.before |= names
        else:
            watch.behind |= names

    return hook


def _watched(watch: _RunWatch, index: int, layer: nn.Module, *, from_layers: bool) -> Any:
    original = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        watch.order_kept &= index == watch.next_layer
        watch.next_layer += 1
        hidden = get_hidden(args, kwargs)
        watch.hidden_shape = watch.hidden_shape or tuple(hidden.shape)
        watch.hidden_dtype = hidden.dtype  # the last layer's: it comes out of a layer, unless there is only one
        others = [value for value in _tensors(args, kwargs) if value is not hidden]
        if any(value.requires_grad for value in others):
            if from_layers:
                watch.side_values = True
            else:
                watch.tainted = True
        watch.side_values |= any(value is extra for value in (*args, *kwargs.values()) for extra in watch.extras)
        shared = [value for value in (*args, *kwargs.values()) if _is_shared(value)]
        output = None
        if not from_layers and (shared or watch.like[index] == index):
            sizes = [len(value) for value in shared]
            output = _try(original, args, kwargs)
            if [len(value) for value in shared] != sizes:
                watch.writers.add(index)
        if output is not None:
            watch.returns[index] = watch.returns_of[type(layer)] = len(output) if isinstance(output, tuple) else 0
        else:  # layers of one class return alike
            watch.returns.setdefault(index, watch.returns_of.get(type(layer), 0))
        first = output[0] if isinstance(output, tuple) else output
        dtype = first.dtype if isinstance(first, torch.Tensor) else hidden.dtype
        result = torch.empty_like(hidden, dtype=dtype).requires_grad_(from_layers)
        if not watch.returns[index]:
            return result
        watch.extras += (extras := [torch.empty_like(hidden) for _ in range(watch.returns[index] - 1)])
        return (result, *extras)

    return forward


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _try(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a layer; None if it reads values, such as an expert router. Its attention has run by then."""
    try:
        return original(*args, **kwargs)
    except Exception:  # noqa: BLE001 - model code may raise anything on tensors without values
        return None


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Floating-point tensors among the arguments, also inside tuples and lists."""
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, tuple | list) else (value,):
            if _is_float(item):
                yield item


def _is_shared(value: Any) -> bool:
    """Whether a layer can write into a value for later layers."""
    return not isinstance(value, StageCache) and hasattr(value, "__setitem__") and not isinstance(value, torch.Tensor)

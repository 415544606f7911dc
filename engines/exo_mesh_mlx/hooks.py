"""Replaces a module's `__call__` without changing the model, the list it is in or its class's name.

Only the class of the object is replaced, by a subclass: isinstance checks and attributes keep working.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.nn as nn

LayerCall = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""(original `__call__` of the class, layer, args, kwargs) -> result for the layer's caller."""


def hook(layer: nn.Module, call: LayerCall) -> None:
    """Make `layer(*args)` run `call(original, layer, args, kwargs)`. Hooking again replaces the hook."""
    original = _own_class(layer).__call__

    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(original, self, args, kwargs)

    replace_call(layer, hooked)


def replace_call(layer: nn.Module, function: Callable[..., Any]) -> None:
    """Make `layer(*args)` run `function(layer, *args)` directly: for functions that run at every step."""
    base = _own_class(layer)
    set_class(layer, type(base.__name__, (base,), {"__call__": function, "_hooked_class": base}))


def unhook(layer: nn.Module) -> None:
    """Restore the layer's own class, so that it no longer refers to the hook."""
    set_class(layer, _own_class(layer))


def set_class(layer: nn.Module, cls: type) -> None:
    """Set the class of a module. nn.Module keeps attributes as dict items, so this bypasses its __setattr__."""
    object.__setattr__(layer, "__class__", cls)


def _own_class(layer: nn.Module) -> Any:
    return getattr(type(layer), "_hooked_class", type(layer))

"""Paths into the nested values that layers take and return.

Arrays are leaves. Tuples, lists, dicts and plain objects (by attribute) are containers. Modules and caches are neither.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec


class Attr(msgspec.Struct, frozen=True):
    """A path step into an object's attribute, as opposed to a dict key."""

    name: str


Path = tuple[Any, ...]


def children(value: Any) -> list[tuple[Any, Any]]:
    """(path step, child) of a container; empty for everything else."""
    if isinstance(value, nn.Module | mx.array | str | bytes | type):
        return []
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if isinstance(value, dict):
        return list(value.items())
    if is_opaque(value):
        return [(Attr(name), child) for name, child in vars(value).items()]
    return []


def is_opaque(value: Any) -> bool:
    """Whether a value is a plain object that may carry arrays in attributes."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, nn.Module | dict | tuple | list)


def arrays(value: Any, skip: Collection[int] = (), path: Path = ()) -> Iterator[tuple[Path, mx.array]]:
    """(path, array) of all arrays inside `value`, in order; objects whose id is in `skip` are not entered."""
    if id(value) in skip:
        return
    if isinstance(value, mx.array):
        yield path, value
    for step, child in children(value):
        yield from arrays(child, skip, (*path, step))


def ids_inside(value: Any) -> Iterator[int]:
    """id of `value` and of everything inside it, but not of the contents of modules."""
    yield id(value)
    for _, child in children(value):
        yield from ids_inside(child)


def get(value: Any, path: Path) -> Any:
    for step in path:
        value = getattr(value, step.name) if isinstance(step, Attr) else value[step]
    return value


def put(value: Any, path: Path, new: Any) -> Any:
    """Put `new` at `path`: dicts, lists and objects in place, tuples by a new tuple. Returns the changed value."""
    if not path:
        return new
    step, rest = path[0], path[1:]
    if isinstance(step, Attr):
        setattr(value, step.name, put(getattr(value, step.name, None), rest, new))
        return value
    if isinstance(value, tuple):
        items = [put(item, rest, new) if i == step else item for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        value[step] = put(value.get(step), rest, new)
    else:
        value[step] = put(value[step], rest, new)
    return value

"""Pages of lists of items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from exo_mesh.api.errors import quoted
from exo_mesh.api.responses.objects import ItemList
from exo_mesh.api.responses.schema import Item
from exo_mesh.errors import InputError

DEFAULT_LIMIT, MAX_LIMIT = 20, 100


def page_of(items: Sequence[Item], query: Mapping[str, str]) -> ItemList:
    """A page of items, given with the oldest first. Raises InputError for a limit out of range, an unknown order, or a
    cursor that is no item."""
    limit, order = query.get("limit", str(DEFAULT_LIMIT)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LIMIT):
        raise InputError(f"limit must be a whole number from 1 to {MAX_LIMIT}, not {quoted(limit)}", param="limit")
    if order not in ("asc", "desc"):
        raise InputError(f'order must be "asc" or "desc", not {quoted(order)}', param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    names = [str(item.get("id")) for item in ordered]
    start, stop = 0, len(ordered)
    if after := query.get("after"):
        start = _place(names, after, "after") + 1
    if before := query.get("before"):
        stop = _place(names, before, "before")
    page = ordered[start:stop][: int(limit)]
    ids = [str(item.get("id")) for item in page]
    return ItemList(page, ids[0] if ids else None, ids[-1] if ids else None, max(0, stop - start) > len(page))


def _place(names: Sequence[str], name: str, param: str) -> int:
    if name not in names:
        raise InputError(f"{param}: there is no item {quoted(name)}", param=param)
    return names.index(name)

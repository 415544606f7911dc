"""The list of models in Anthropic's form."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from exo_mesh.api.errors import quoted
from exo_mesh.errors import InputError
from exo_mesh.models.entry import ModelEntry

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000


def model_info(entry: ModelEntry, created: int) -> dict[str, Any]:
    """A model of the mesh. created: the Unix time of the node's start, because clients expect a time."""
    return {
        "type": "model",
        "id": entry.name,
        "display_name": entry.name,
        "created_at": datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": entry.context_length or None,
        "max_tokens": entry.context_length or None,
    }


def models_page(entries: Sequence[ModelEntry], created: int, query: Mapping[str, str]) -> dict[str, Any]:
    """A page of the list. Raises InputError for a limit out of range, or a cursor that is no model."""
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 4 and 1 <= int(limit) <= MAX_LIMIT):
        raise InputError(f"limit must be a whole number from 1 to {MAX_LIMIT}, not {quoted(limit)}", param="limit")
    names = [entry.name for entry in entries]
    start, stop = 0, len(entries)
    if after := query.get("after_id"):
        start = _place(names, after, "after_id") + 1
    if before := query.get("before_id"):
        stop = _place(names, before, "before_id")
    if before and not after:
        page = entries[max(start, stop - int(limit)) : stop]
        has_more = stop - int(limit) > start
    else:
        page = entries[start:stop][: int(limit)]
        has_more = stop - start > int(limit)
    return {
        "data": [model_info(entry, created) for entry in page],
        "has_more": has_more,
        "first_id": page[0].name if page else None,
        "last_id": page[-1].name if page else None,
    }


def _place(names: Sequence[str], name: str, param: str) -> int:
    if name not in names:
        raise InputError(f"{param}: there is no model {quoted(name)}", param=param)
    return names.index(name)

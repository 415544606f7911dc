"""The ids of responses and of their items: the id of an item names its response and its place in it. Pure."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

ItemKind = Literal["msg", "rs", "fc", "ctc", "in"]
"""Beginnings of ids: a message, reasoning, a call of a function or of a custom tool, an item of the input."""

PREFIX = "resp_"
_ITEM = re.compile(r"(msg|rs|fc|ctc|in)_([\x21-\x7e]{1,200})_([0-9]{1,6})")


class ItemPlace(msgspec.Struct, frozen=True):
    """Where a stored item is. place: its index in the output, or in the input of the request."""

    response_id: str
    place: int
    is_input: bool


def item_id(kind: ItemKind, response_id: str, place: int) -> str:
    """The id of an item of a response."""
    return f"{kind}_{response_id.removeprefix(PREFIX)}_{place}"


def place_of(name: str) -> ItemPlace | None:
    """The place that the id of an item names; None if it was not made here."""
    found = _ITEM.fullmatch(name)
    return None if found is None else ItemPlace(PREFIX + found[2], int(found[3]), found[1] == "in")

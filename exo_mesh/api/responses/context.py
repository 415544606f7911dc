"""Gathers what a request refers to: the conversation before it, and single stored items."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.api.bodies.values import ValueBudget
from exo_mesh.api.core.neutral_fields import show_json
from exo_mesh.api.decoding import convert_part
from exo_mesh.api.responses.ids import PREFIX, place_of
from exo_mesh.api.responses.items import ItemReference, kind_of
from exo_mesh.api.responses.schema import Item
from exo_mesh.api.responses.stored import read_stored
from exo_mesh.api.responses.translate import PlacedItems
from exo_mesh.domain.bounded_json import MAX_KEPT_VALUES
from exo_mesh.errors import InputError, UnknownAnswerError
from exo_mesh.rings.serving.kept_service import KeptService

REFERENCE = "item_reference"
MAX_STEPS = 8
"""Most references from one stored reference to the next."""

MAX_RESPONSES = 512
"""Most responses whose items one request may refer to."""


async def gather_items(
    kept: KeptService, key_id: str | None, own: Sequence[Item], previous_id: str | None
) -> PlacedItems:
    """The items of a request and of the conversation before it. key_id: of the caller; see KeptService.

    Raises UnknownAnswerError if the conversation is not kept, and InputError for a reference to an unknown item.
    """
    history: list[Item] = []
    if previous_id and not previous_id.startswith(PREFIX):
        raise UnknownAnswerError(kept.missing(previous_id), param="previous_response_id")
    if previous_id:
        budget = ValueBudget(MAX_KEPT_VALUES)
        for answer in reversed(await kept.chain(key_id, previous_id)):
            budget.take(answer.data, "previous_response_id")
            stored = read_stored(answer.data)
            history += [*stored.items(), *stored.output()]
    items = _References(kept, key_id)
    resolved = [await items.resolved(item, "previous_response_id") for item in history]
    named = [await items.resolved(item, f"input[{index}]") for index, item in enumerate(own)]
    return PlacedItems(resolved, named)


class _References:
    """Reads the responses that references name, each once."""

    def __init__(self, kept: KeptService, key_id: str | None) -> None:
        self._kept = kept
        self._key_id = key_id
        self._budget = ValueBudget(MAX_KEPT_VALUES)
        self._read: dict[str, tuple[list[Item], list[Item]] | None] = {}
        """(input, output) of each response; None if it is not kept."""

    async def resolved(self, item: Item, where: str) -> Item:
        """The item itself, or the item that it refers to. Raises InputError."""
        found: Item | None = item
        for _ in range(MAX_STEPS):
            if found is None or kind_of(found) != REFERENCE:
                break
            found = await self._target(convert_part(found, ItemReference, where).id)
        if found is None or kind_of(found) == REFERENCE:
            name = show_json(item.get("id"))
            message = f"{where}: no item {name} is stored for you; send the item itself instead of a reference"
            raise InputError(message, param=where)
        return found

    async def _target(self, name: str) -> Item | None:
        place = place_of(name)
        if place is None:
            return None
        if place.response_id not in self._read:
            if len(self._read) >= MAX_RESPONSES:
                raise InputError(f"input refers to items of more than {MAX_RESPONSES} responses", param="input")
            answer = await self._kept.read(self._key_id, place.response_id)
            if answer is not None:
                self._budget.take(answer.data, "input")
            stored = None if answer is None else read_stored(answer.data)
            self._read[place.response_id] = None if stored is None else (stored.items(), stored.output())
        known = self._read[place.response_id]
        if known is None:
            return None
        items = known[0] if place.is_input else known[1]
        return items[place.place] if place.place < len(items) else None

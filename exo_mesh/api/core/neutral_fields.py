"""Accepts fields at values that change nothing: each dialect has a table of such fields and values. Pure.

A field that would change the answer is honoured or refused: a listed field with another value gets a 400 that names it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from exo_mesh.errors import InputError

MAX_SHOWN = 60

ANY: tuple[Any, ...] = ()
"""For fields whose value never changes the answer: labels, hints about speed, and settings of a feature that another
field turns on."""

NeutralTable = Mapping[str, tuple[Any, ...]]
"""For each field the values that have no effect, or ANY; null never has an effect."""


def without_fields(
    body: bytes,
    table: NeutralTable,
    known: Collection[str],
    in_messages: NeutralTable,
    known_in_messages: Collection[str],
) -> bytes:
    """Remove the fields of a table that the route does not know from the JSON object `body`, and those of `in_messages`
    from its messages.

    Raises InputError for such a field with another value, and msgspec's errors for malformed JSON.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    drop_fields(fields, table, known, "")
    if "messages" in known and (messages := fields.get("messages")) is not None:
        fields["messages"] = _without_notes(messages, in_messages, known_in_messages)
    return msgspec.json.encode(fields)


def _without_notes(messages: msgspec.Raw, table: NeutralTable, known: Collection[str]) -> msgspec.Raw:
    """The messages without neutral fields. Anything but a list of objects stays unchanged, and the struct refuses
    it."""
    try:
        turns = msgspec.json.decode(messages, type=list[dict[str, msgspec.Raw]])
    except msgspec.ValidationError:
        return messages
    for index, turn in enumerate(turns):
        drop_fields(turn, table, known, f"messages[{index}].")
    return msgspec.Raw(msgspec.json.encode(turns))


def drop_fields(fields: dict[str, msgspec.Raw], table: NeutralTable, known: Collection[str], where: str) -> None:
    """Remove the fields of a table that are not `known`. Mutates fields. where: a prefix of their names, for errors.

    Raises InputError for such a field with another value.
    """
    for name in [name for name in fields if name in table and name not in known]:
        raw, allowed = fields.pop(name), table[name]
        if allowed is not ANY:
            refuse_unless(where + name, msgspec.json.decode(raw), allowed)


def refuse_unless(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raises InputError if a field has a value that is neither null nor allowed."""
    if value is not None and not any(_is_same(value, choice) for choice in allowed):
        choices = " or ".join(show_json(choice) for choice in allowed)
        raise InputError(f"{name} is {show_json(value)}, which is not supported yet; it must be {choices}", param=name)


def show_json(value: Any) -> str:
    """The value as JSON, shortened to at most about one line."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = json.dumps(value[: MAX_SHOWN + 1] if isinstance(value, str) else value, ensure_ascii=False)
    except RecursionError:
        text = " " * (MAX_SHOWN + 1)
    if len(text) <= MAX_SHOWN:
        return text
    if isinstance(value, list):
        return f"a list of {len(value)} items"
    return "an object" if isinstance(value, dict) else text[: MAX_SHOWN - 3] + "..."


def _is_same(value: Any, choice: Any) -> bool:
    """Whether two JSON values are equal: 1 equals 1.0, but true does not equal 1."""
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)

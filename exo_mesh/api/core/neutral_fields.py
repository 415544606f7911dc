"""Accepts fields at values that change nothing, in every dialect by one rule. Pure.

A field that would change the answer is honoured or refused by name. An empty value of an unknown field changes nothing,
unless it turns something off that is on by default.
Each dialect has tables of further such values.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

from exo_mesh.base.long_texts import LongTexts
from exo_mesh.errors import InputError

MAX_SHOWN = 60

ANY: tuple[Any, ...] = ()
"""For fields whose value never changes the answer: labels, hints about speed, and settings of a feature that another
field turns on."""

ONLY_NULL: tuple[Any, ...] = (None,)
"""For fields that even an empty object turns on."""

OFF_SWITCHES = frozenset(
    {
        "activation", "cache", "do_sample", "enable_thinking", "normalized", "parallel_tool_calls", "reasoning",
        "reasoning_effort", "think", "thinking", "use_activation",
    }
)  # fmt: skip
"""Fields of some servers whose `false` turns something off. A dialect without the field refuses `false`."""

FALSE_IS_DEFAULT = frozenset({"logprobs", "response_format", "stop", "thread", "tools", "top_logprobs"})
"""Known fields that hold no boolean, for which `false` still means the default."""

NeutralTable = Mapping[str, tuple[Any, ...]]
"""For each field the values that have no effect, or ANY. A field that is not listed has no effect if it is empty."""

NeutralTables = Mapping[type[msgspec.Struct], NeutralTable]
"""The table of each kind of object in a body."""


def is_empty(value: Any) -> bool:
    """Whether a JSON value is null, false, "", [] or {}."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def without_neutral(value: Any, kind: Any, tables: NeutralTables, where: str = "") -> Any:
    """A copy of a JSON value without fields that change nothing, and with 5.0 as 5 where `kind` wants an integer.

    kind: the type that the value will be converted to. A field changes nothing if it is empty and not in `kind`, if it
    is empty and `kind` has a default but no such value, or if its table says so. `false` may turn something off, so
    OFF_SWITCHES and FALSE_IS_DEFAULT say where it changes nothing. where: the place of the value in its body. Raises
    InputError for a field of a table with another value.
    """
    kinds = members_of(kind)
    if isinstance(value, float) and int in kinds and float not in kinds and value.is_integer():
        return int(value)
    for one in kinds:
        if isinstance(value, dict) and isinstance(one, type) and issubclass(one, msgspec.Struct):
            return _object_without_neutral(value, one, tables, where)
        if isinstance(value, list) and get_origin(one) in (list, tuple):
            item = get_args(one)[0]  # the items of a tuple have one type in all bodies
            return [without_neutral(part, item, tables, f"{where}[{index}]") for index, part in enumerate(value)]
        if isinstance(value, dict) and get_origin(one) is dict:
            item = get_args(one)[1]
            return {name: without_neutral(part, item, tables, f"{where}[{name}]") for name, part in value.items()}
    return value


def _object_without_neutral(
    value: dict[str, Any], kind: type[msgspec.Struct], tables: NeutralTables, where: str
) -> dict[str, Any]:
    known = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    table = tables.get(kind, {})
    kept = {}
    for name, given in value.items():
        place = f"{where}.{name}" if where else name
        field = known.get(name)
        if field is None:
            if (given is False and name in OFF_SWITCHES and name not in table) or not _changes_nothing(
                place, given, table.get(name)
            ):
                kept[name] = given
        elif field.required or not _is_default(name, given) or _fits(given, field.type):
            kept[name] = without_neutral(given, field.type, tables, place)
    return kept


def _is_default(name: str, value: Any) -> bool:
    """Whether a value means that an optional field which has no such value is missing."""
    return is_empty(value) and (value is not False or name in FALSE_IS_DEFAULT)


def _changes_nothing(name: str, value: Any, allowed: tuple[Any, ...] | None) -> bool:
    """Whether a field that no type knows changes nothing. allowed: its row of a table. Raises InputError for another
    value of a listed field."""
    if allowed is None:
        return is_empty(value)
    is_off_switch = value is False and any(choice is True for choice in allowed)
    if allowed is not ANY and (allowed == ONLY_NULL or is_off_switch or not is_empty(value)):
        refuse_unless(name, value, allowed)
    return True


def members_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union, without their annotations."""
    found = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return tuple(get_args(one)[0] if get_origin(one) is Annotated else one for one in found)


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError:
        return False
    return True


def refuse_unknown(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises InputError if an object has a field that is not known and not empty. where: its place in the body."""
    for name in sorted(given.keys() - known):
        if not is_empty(given[name]):
            raise InputError(f"{where}.{name}: exo-mesh does not support this field", param=f"{where}.{name}")


def refuse_unless(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raises InputError if a field has a value that is neither null nor allowed."""
    if value is not None and not any(_is_same(value, choice) for choice in allowed):
        choices = " or ".join(show_json(choice) for choice in allowed)
        raise InputError(f"{name} is {show_json(value)}, which is not supported yet; it must be {choices}", param=name)


def show_json(value: Any) -> str:
    """The value as JSON, shortened to at most about one line."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    long = LongTexts()
    try:
        shown = value[: MAX_SHOWN + 1] if isinstance(value, str) else long.out_of(value)
        text = json.dumps(shown, ensure_ascii=False) if not len(long) else " " * (MAX_SHOWN + 1)
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

"""Replies of the API made of the fields that a test is about; all other required fields are empty, 0 or None."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

R = TypeVar("R", bound=msgspec.Struct)

_EMPTY = {
    inspect.StrType: "",
    inspect.IntType: 0,
    inspect.FloatType: 0.0,
    inspect.BoolType: False,
    inspect.NoneType: None,
    inspect.DictType: {},
    inspect.ListType: [],
    inspect.VarTupleType: [],
}


def report_of(kind: type[R], **given: Any) -> R:
    """A struct of `domain.reports` with these fields; a nested one may be a mapping that names only some of its own."""
    return msgspec.convert(_filled(inspect.type_info(kind), given), kind)


def reply_of(kind: type[R], **given: Any) -> dict[str, Any]:
    """The same struct as a client gets it: as JSON."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(report_of(kind, **given)))
    return found


def _filled(kind: inspect.Type, given: Any) -> Any:
    if isinstance(kind, inspect.UnionType):
        kinds = {type(one): one for one in kind.types}
        match given:
            case None:
                return None
            case Mapping():
                return _filled(kinds.get(inspect.StructType) or kinds[inspect.DictType], given)
            case list() | tuple():
                return _filled(kinds[inspect.ListType], given)
        return given
    if isinstance(kind, inspect.StructType | inspect.DataclassType) and isinstance(given, Mapping):
        needed = {field.encode_name: field for field in kind.fields}
        assert given.keys() <= needed.keys(), f"{kind.cls.__name__} has no {given.keys() - needed.keys()}"
        known = {name: _filled(needed[name].type, value) for name, value in given.items()}
        return {name: _empty(field.type) for name, field in needed.items() if field.required} | known
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return [_filled(kind.item_type, one) for one in given]
    if isinstance(kind, inspect.DictType):
        return {key: _filled(kind.value_type, one) for key, one in given.items()}
    return msgspec.to_builtins(given)


def _empty(kind: inspect.Type) -> Any:
    match kind:
        case inspect.StructType() | inspect.DataclassType():
            return _filled(kind, {})
        case inspect.EnumType():
            return next(iter(kind.cls)).value
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.TupleType():
            return [_empty(one) for one in kind.item_types]
        case inspect.UnionType():
            return None if any(isinstance(one, inspect.NoneType) for one in kind.types) else _empty(kind.types[0])
    return _EMPTY[type(kind)]

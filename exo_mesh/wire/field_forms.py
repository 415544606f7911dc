"""Writes the expressions that read and write one field of a message, from its type, its marks and its descriptor.

An expression is Python source around the source of a value: of `message.name` may become `message.name[:64]`. So the
codec's functions are the code that would be written by hand, and as fast.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate, islice
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from exo_mesh.base.printable import printable
from exo_mesh.domain import fields as marks
from exo_mesh.errors import PeerVersionError, TransportError

Expression = Callable[[str], str]
_Mark = TypeVar("_Mark")


def as_it_is(source: str) -> str:
    return source


class FieldForm(NamedTuple):
    """How a value is read and written. Nobody writes None by it."""

    read: Expression = as_it_is
    write: Expression = as_it_is


AS_IT_IS = FieldForm()
_PLAIN = (int, str, bool, float)


class FieldScope:
    """The objects by name that the expressions of one class use."""

    def __init__(self, part: Callable[[Any, Descriptor, frozenset[str]], tuple[Any, Any]]) -> None:
        """part: gives the functions that read and write a class as a part of a message, without fields of these
        names."""
        self.part = part
        self.names: dict[str, Any] = {"islice": islice, "printable": printable, "within": _within, "valid": _valid}

    def name(self, value: Any) -> str:
        """A name for an object in the expressions."""
        name = f"v{len(self.names)}"
        self.names[name] = value
        return name

    def call(self, function: Any) -> Expression:
        name = self.name(function)
        return lambda source: f"{name}({source})"

    def variable(self) -> str:
        return self.name(None)


def peeled(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """(the type, the marks) of an annotation, without None."""
    found: tuple[Any, ...] = ()
    while True:
        if get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            found = (*more, *found)
        elif is_optional(hint):
            [hint] = [one for one in get_args(hint) if one is not NoneType]
        else:
            return hint, found


def is_optional(hint: Any) -> bool:
    """Whether the annotation allows None."""
    if get_origin(hint) is Annotated:
        return is_optional(get_args(hint)[0])
    return get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)


def one_mark(found: Iterable[Any], kind: type[_Mark]) -> _Mark | None:
    return next((mark for mark in found if isinstance(mark, kind)), None)


def of(hint: Any, field: FieldDescriptor, scope: FieldScope) -> FieldForm:
    """The form of a whole field: a map, a repeated field or a single value. Whether an optional field is set is asked
    by the caller."""
    if hint in _PLAIN and field.type != FieldDescriptor.TYPE_BYTES:
        return AS_IT_IS
    inner, found = peeled(hint)
    if get_origin(inner) is Mapping:
        return FieldForm(_map(found, scope))
    if field.is_repeated:
        return _repeated(inner, found, field, scope)
    form = _single(inner, found, field, scope)
    if field.has_presence:
        return form
    unset = one_mark(found, marks.Absent)
    if unset is not None or is_optional(hint):
        return _falsy(form, "None" if unset is None else scope.name(unset.value), scope)
    return form


def _falsy(form: FieldForm, absent: str, scope: FieldScope) -> FieldForm:
    """A form in which 0, "" or nothing stands for a value."""
    if form.read is as_it_is:
        return FieldForm(lambda value: f"({value} or {absent})", form.write)
    name = scope.variable()
    return FieldForm(lambda value: f"({form.read(name)} if ({name} := {value}) else {absent})", form.write)


def _map(found: tuple[Any, ...], scope: FieldScope) -> Expression:
    cut = one_mark(found, marks.Cut)
    if cut is None:
        return lambda value: f"dict({value}.items())"
    return lambda value: f"dict(islice({value}.items(), {cut.most}))"


def _repeated(hint: Any, found: tuple[Any, ...], field: FieldDescriptor, scope: FieldScope) -> FieldForm:
    items = get_args(hint)
    is_set = get_origin(hint) is frozenset
    if not is_set and items[-1] is not Ellipsis:
        return FieldForm(scope.call(_fixed(len(items), _name(field))))
    item_hint, item_marks = peeled(items[0])
    item = _single(item_hint, item_marks, field, scope)
    if is_optional(items[0]):
        item = FieldForm(_falsy(item, "None", scope).read, _none_as_text(item.write))
    whole = "frozenset" if is_set else "tuple"
    read = [_bound(mark, field, scope) for mark in found if isinstance(mark, marks.Cut | marks.Size)]
    each = _each_valid if one_mark(found, marks.OnlyValid) else _each
    read += [_unless_empty(each(whole, item.read, scope), f"{whole}()", scope)]
    read += [scope.call(_range_of_all(mark, field)) for mark in found if isinstance(mark, marks.Range)]
    read += [_bound(mark, field, scope) for mark in found if isinstance(mark, marks.Only | marks.Tidied)]
    write: list[Expression] = [lambda value: f"sorted({value})"] if is_set else []
    write += [_bound(mark, field, scope) for mark in found if isinstance(mark, marks.Cut | marks.FirstBytes)]
    write += [] if item.write is as_it_is else [_unless_empty(_each("", item.write, scope), "None", scope)]
    return FieldForm(_chain(read), _chain(write))


def _none_as_text(write: Expression) -> Expression:
    return lambda value: f'("" if {value} is None else {write(value)})'


def _each(whole: str, item: Expression, scope: FieldScope) -> Expression:
    if item is as_it_is:
        return lambda values: f"{whole}({values})"
    name = scope.variable()
    return lambda values: f"{whole}([{item(name)} for {name} in {values}])"


def _unless_empty(read: Expression, empty: str, scope: FieldScope) -> Expression:
    """Iterating over an empty repeated field takes 0.6 us, and most are empty."""
    name = scope.variable()
    return lambda values: f"({read(name)} if ({name} := {values}) else {empty})"


def _each_valid(whole: str, item: Expression, scope: FieldScope) -> Expression:
    name = scope.variable()
    return lambda values: f"{whole}(valid(lambda {name}: {item(name)}, {values}))"


def _valid(read: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """The items that can be read."""
    for item in items:
        with contextlib.suppress(ValueError, TransportError):
            yield read(item)


def _fixed(length: int, name: str) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    def read(values: Sequence[Any]) -> tuple[Any, ...]:
        if len(values) != length:
            raise ValueError(f"{name} has {len(values)} values, not {length}")
        return tuple(values)

    return read


_BEFORE = (marks.Cut, marks.Size, marks.Range, marks.Printable, marks.Clamped)


def _single(hint: Any, found: tuple[Any, ...], field: FieldDescriptor, scope: FieldScope) -> FieldForm:
    """One value, or one item of a repeated field."""
    form = _plain(hint, found, field, scope)
    before = [_bound(mark, field, scope) for mark in found if isinstance(mark, _BEFORE)]
    after = [_bound(mark, field, scope) for mark in found if isinstance(mark, marks.Only | marks.Tidied)]
    cuts = [_bound(mark, field, scope) for mark in found if isinstance(mark, marks.Cut)]
    return FieldForm(_chain([*before, form.read, *after]), _chain([*cuts, form.write]))


def _plain(hint: Any, found: tuple[Any, ...], field: FieldDescriptor, scope: FieldScope) -> FieldForm:
    if field.message_type is not None:
        return _message(hint, field.message_type, scope)
    if get_origin(hint) is Literal:
        return FieldForm(_known({value: value for value in get_args(hint)}, found, field, scope))
    if isinstance(hint, type) and issubclass(hint, Enum):
        if field.enum_type is None:
            return FieldForm(_known({one.value: one for one in hint}, found, field, scope))
        prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        numbers = {one: field.enum_type.values_by_name[prefix + one.name].number for one in hint}
        read = _known({number: one for one, number in numbers.items()}, found, field, scope)
        return FieldForm(read, scope.call(numbers.__getitem__))
    if (otherwise := one_mark(found, marks.Else)) is not None:
        return FieldForm(_known({value: value for value in otherwise.known}, found, field, scope))
    if hint is str and field.type == FieldDescriptor.TYPE_BYTES:
        errors = "strict" if one_mark(found, marks.AnyText) is None else "surrogatepass"
        return FieldForm(
            lambda value: f'{value}.decode("utf-8", "{errors}")', lambda value: f'{value}.encode("utf-8", "{errors}")'
        )
    return FieldForm()


def _known(values: Mapping[Any, Any], found: tuple[Any, ...], field: FieldDescriptor, scope: FieldScope) -> Expression:
    """Reads a value that must be one of the keys."""
    otherwise = one_mark(found, marks.Else)
    if otherwise is not None:
        table, other = scope.name(values), scope.name(otherwise.otherwise)
        return lambda value: f"{table}.get({value}, {other})"
    name, error = _name(field), PeerVersionError if one_mark(found, marks.Newer) else ValueError

    def read(value: Any) -> Any:
        try:
            return values[value]
        except KeyError:
            text = f'"{printable(value, 40)}"' if isinstance(value, str) else value
            raise error(f"{name} is {text}, which this version does not know") from None

    return scope.call(read)


def _message(hint: Any, message: Descriptor, scope: FieldScope) -> FieldForm:
    items = get_args(hint)
    if get_origin(hint) is not tuple:
        return FieldForm(*map(scope.call, scope.part(hint, message, frozenset())))
    if items[-1] is not Ellipsis:
        return _positional(items, message, scope)
    [field] = message.fields
    form = _repeated(hint, (), field, scope)
    return FieldForm(
        lambda value: form.read(f"{value}.{field.name}"), lambda value: f'{{"{field.name}": {form.write(value)}}}'
    )


def _positional(items: tuple[Any, ...], message: Descriptor, scope: FieldScope) -> FieldForm:
    """A tuple whose items are the fields of a message, in order. A Flat item, the last one, has all further fields."""
    is_flat = one_mark(peeled(items[-1])[1], marks.Flat) is not None
    num_plain = len(items) - is_flat
    fields = message.fields[:num_plain]
    assert is_flat or num_plain == len(message.fields), f"{message.name} has further fields"
    forms = [of(hint, field, scope) for hint, field in zip(items, fields, strict=False)]
    if is_flat:
        names = frozenset(field.name for field in fields)
        flat_form = FieldForm(*map(scope.call, scope.part(peeled(items[-1])[0], message, names)))

    def read(value: str) -> str:
        parts = [form.read(f"{value}.{field.name}") for form, field in zip(forms, fields, strict=True)]
        parts += [flat_form.read(value)] if is_flat else []
        return f"({', '.join(parts)},)"

    def write(value: str) -> str:
        parts = [
            f'"{field.name}": {form.write(f"{value}[{at}]")}'
            for at, (form, field) in enumerate(zip(forms, fields, strict=True))
        ]
        parts += [f"**{flat_form.write(f'{value}[{num_plain}]')}"] if is_flat else []
        return f"{{{', '.join(parts)}}}"

    return FieldForm(read, write)


def _chain(expressions: list[Expression]) -> Expression:
    """One expression that applies all of them in order."""
    parts = [one for one in expressions if one is not as_it_is]
    if len(parts) < 2:
        return parts[0] if parts else as_it_is

    def apply(value: str) -> str:
        for part in parts:
            value = part(value)
        return value

    return apply


def _bound(mark: Any, field: FieldDescriptor, scope: FieldScope) -> Expression:
    """The expression of a mark that changes or refuses a value."""
    match mark:
        case marks.Cut(most):
            return lambda value: f"{value}[:{most}]"
        case marks.Size():
            return scope.call(_size(mark, _name(field)))
        case marks.Range():
            return scope.call(_range(mark, _name(field)))
        case marks.Printable(most):
            return lambda value: f"printable({value}, {most})"
        case marks.Clamped(least, most):
            return lambda value: f"max({least}, min({value}, {most}))"
        case marks.Only(accepts):
            name = scope.name(accepts)
            return lambda values: f"tuple(filter({name}, {values}))"
        case marks.Tidied(tidy):
            return scope.call(tidy)
        case marks.FirstBytes(most):
            return lambda names: f"within({names}, {most})"
    raise AssertionError(f"{mark} has no expression")


def _name(field: FieldDescriptor) -> str:
    assert field.containing_type is not None, "no message has extensions"
    return f"{field.name} of {field.containing_type.name}"


def _size(mark: marks.Size, name: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        length = len(value)
        if length not in mark.sizes if mark.sizes else not mark.least <= length <= mark.most:
            allowed = " or ".join(map(str, mark.sizes)) or f"from {mark.least} to {mark.most}"
            raise ValueError(f"{name} has the length {length}, not {allowed}")
        return value

    return check


def _range(mark: marks.Range, name: str) -> Callable[[Any], Any]:
    least, most = mark.least, mark.most

    def check(value: Any) -> Any:
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}, not a finite number")
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}, not between {least:.17g} and {most:.17g}")
        return value

    return check


def _range_of_all(mark: marks.Range, field: FieldDescriptor) -> Callable[[Sequence[Any]], Sequence[Any]]:
    check = _range(mark, _name(field))
    is_unsigned = field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64) and mark.least <= 0

    def check_all(values: Sequence[Any]) -> Sequence[Any]:
        if values:
            check(max(values))
            if not is_unsigned:
                check(min(values))
        return values

    return check_all


def _within(names: Sequence[Any], most: int) -> Sequence[Any]:
    """As many of the first names as fit into this many bytes."""
    texts = (one if isinstance(one, str) else one[0] for one in names)
    return names[: sum(size <= most for size in accumulate(len(text.encode("utf-8", "replace")) for text in texts))]

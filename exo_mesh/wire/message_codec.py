"""Turns messages into records and back by the names of their fields, from the message's descriptor.

A `Codec` joins a class (a dataclass, a NamedTuple or a msgspec struct) and a message. At its first use it is compiled
to functions like those that would be written by hand, which cost the same. Bounds and differences of form are marks in
the annotations of the class (exo_mesh.domain.fields). They hold when a message is read; only FirstBytes, and Cut but
for maps, hold when one is written, too.

    field of the class              field of the message
    int, float, bool, str, bytes    the same; a str also as bytes (UTF-8)
    X | None                        optional; or X, where 0, "" or no message stand for None
    an Enum                         an enum with the same names, or its text
    Literal                         a text
    a class                         a message, in the same way
    tuple[X, ...], frozenset[X]     repeated, or a message with one repeated field
    tuple[X, Y]                     a message, by the order of its fields
    Mapping[str, X]                 a map

A `UnionCodec` joins several classes and a message with one oneof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import get_annotations
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from exo_mesh.domain import fields as marks
from exo_mesh.wire import field_forms
from exo_mesh.wire.field_forms import FieldScope, as_it_is, is_optional, one_mark, peeled

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Fields = dict[str, Any]


class Codec(Generic[T, M]):
    """Reads one kind of message as a class, and writes it.

    besides: fields of the message that the caller reads and writes. error: raised instead of ValueError for a message
    that breaks a bound. A field of either side that has no counterpart is an AssertionError at the first use.
    """

    def __init__(
        self, cls: type[T], message: type[M], *, besides: Iterable[str] = (), error: type[Exception] | None = None
    ) -> None:
        self.cls = cls
        self.message = message
        self.besides = frozenset(besides)
        self.error = error
        self._read: Callable[..., T] | None = None
        self._fields: Callable[[T], Fields] | None = None

    def read(self, message: M, **given: Any) -> T:
        """Make the class of a message. given: the values of fields that are NotSent. Raises ValueError, or the codec's
        own error, for a message that breaks a bound, and PeerVersionError for a value of a newer version."""
        read = self._read or self._compile()[0]
        if self.error is None:
            return read(message, **given)
        try:
            return read(message, **given)
        except ValueError as exc:
            raise self.error(f"a peer sent an invalid {self.message.DESCRIPTOR.name}: {exc}") from exc

    def write(self, value: T, **besides: Any) -> M:
        """Make the message of a value. besides: further fields of the message."""
        fields = self._fields or self._compile()[1]
        return self.message(**fields(value), **besides)

    def _compile(self) -> tuple[Callable[..., T], Callable[[T], Fields]]:
        self._read, self._fields, _ = compiled(self.cls, self.message.DESCRIPTOR, self.besides)  # type: ignore[arg-type]
        return self._read, self._fields


class UnionCodec(Generic[T, M]):
    """Reads a message that is one of several kinds, and writes it. kinds: the class of each field of its oneof."""

    def __init__(self, message: type[M], **kinds: type[T]) -> None:
        self.message = message
        parts = message.DESCRIPTOR.fields_by_name
        classes = {name: GetMessageClass(part.message_type) for name, part in parts.items()}  # type: ignore[arg-type]
        self.codecs = {name: Codec(cls, classes[name]) for name, cls in kinds.items()}
        self._names = {cls: name for name, cls in kinds.items()}
        [self._oneof] = message.DESCRIPTOR.oneofs_by_name
        assert {*parts} == {*kinds}, f"{message.DESCRIPTOR.name} has the kinds {sorted(parts)}"

    def read(self, message: M) -> T | None:
        """Make the value of a message; None for a kind that only a newer version knows."""
        name = message.WhichOneof(self._oneof)
        return None if name is None else self.codecs[name].read(getattr(message, name))

    def write(self, value: T) -> M:
        """Make the message of a value."""
        name = self._names[type(value)]
        return self.message(**{name: self.codecs[name].write(value)})


class _ReadAndWrite(NamedTuple):
    """The functions that make a class of a message, and the fields of the message of the class. used: the names of the
    message's fields that they use."""

    read: Callable[..., Any]
    write: Callable[[Any], Fields]
    used: frozenset[str]


_by_hand: dict[Any, _ReadAndWrite] = {
    range: _ReadAndWrite(
        lambda message: range(message.start, message.stop),
        lambda one: {"start": one.start, "stop": one.stop},
        frozenset({"start", "stop"}),
    )
}
_compiled: dict[tuple[Any, str], _ReadAndWrite] = {}


def by_hand(cls: type[Any], read: Callable[[Any], Any], write: Callable[[Any], Any], *names: str) -> None:
    """Read and write a class by these functions wherever it is a part of a message. write: gives the fields of that
    part, or the part itself. names: of the message's fields that they use."""
    _by_hand[cls] = _ReadAndWrite(read, write, frozenset(names))


def compiled(cls: Any, message: Descriptor, besides: frozenset[str] = frozenset()) -> _ReadAndWrite:
    """The functions of a class in a message. besides: fields of the message that something else reads."""
    functions = _functions(cls, message)
    left = {field.name for field in message.fields} - functions.used - besides
    assert not left, f"{cls.__name__} has no field for {sorted(left)} of {message.name}"
    return functions


def _functions(cls: Any, message: Descriptor) -> _ReadAndWrite:
    if (found := _by_hand.get(cls)) is not None:
        return found
    key = (cls, message.full_name)
    if key not in _compiled:
        _compiled[key] = _compile(cls, message)
    return _compiled[key]


def _compile(cls: Any, message: Descriptor) -> _ReadAndWrite:
    """Write the two functions of a class as source, and compile them. Names and numbers in it are of our own classes
    and .proto files; nothing that a peer sends gets into it."""
    scope = FieldScope(lambda part, descriptor, besides: compiled(part, descriptor, besides)[:2])
    reads: list[str] = []
    writes: list[str] = []
    used: set[str] = set()
    unsent = False
    for name, hint in hints_of(cls).items():
        inner, found = peeled(hint)
        if one_mark(found, marks.NotSent) is not None:
            unsent = True
            continue
        place = f"{name}=" if unsent else ""
        if one_mark(found, marks.Flat) is not None:
            flat = _functions(inner, message)
            reads.append(f"{place}{scope.name(flat.read)}(message)")
            writes.append(f"**{scope.name(flat.write)}(value.{name})")
            used |= flat.used
            continue
        field = message.fields_by_name.get(_wire(name, found))
        assert field is not None, f"{message.name} has no field {_wire(name, found)} for {cls.__name__}.{name}"
        read, write = _expressions(name, hint, field, scope)
        reads.append(f"{place}{read}")
        writes.append(f'"{field.name}": {write}')
        used.add(field.name)
    names = {**scope.names, "cls": cls}
    given = ", **given" if unsent else ""
    text = f"""
def read(message{given}): return cls({", ".join(reads)}{given})
def write(value): return {{{", ".join(writes)}}}
"""
    exec(compile(text, f"<codec of {cls.__name__}>", "exec"), names)
    return _ReadAndWrite(names["read"], names["write"], frozenset(used))


def hints_of(cls: Any) -> dict[str, Any]:
    """The fields of a dataclass, a msgspec struct or a NamedTuple, in order, with their annotations."""
    if issubclass(cls, tuple):
        return get_type_hints(cls, include_extras=True)
    names = cls.__struct_fields__ if hasattr(cls, "__struct_fields__") else cls.__dataclass_fields__
    hints = get_annotations(cls, eval_str=True)  # half the time of get_type_hints, which checks each type
    assert [*hints] == [*names], f"{cls.__name__} inherits fields, or has annotations that are no fields"
    return hints


def _wire(name: str, found: tuple[Any, ...]) -> str:
    named = one_mark(found, marks.SentAs)
    return name if named is None else named.name


def _expressions(name: str, hint: Any, field: FieldDescriptor, scope: FieldScope) -> tuple[str, str]:
    """The expressions that read and write one field."""
    form = field_forms.of(hint, field, scope)
    unset = one_mark(peeled(hint)[1], marks.Absent)
    absent = "None" if unset is None else scope.name(unset.value)
    read, write = form.read(f"message.{field.name}"), form.write(f"value.{name}")
    can_be_unset = unset is not None or is_optional(hint)
    if can_be_unset and field.has_presence:
        read = f'{read} if message.HasField("{field.name}") else {absent}'
    if unset is not None:
        write = f"None if value.{name} == {absent} else {write}"
    elif can_be_unset and form.write is not as_it_is:
        write = f"None if value.{name} is None else {write}"
    return read, write

"""Each class that is a message arrives as it was, and each bound of its fields holds against what a peer sends."""

from __future__ import annotations

import contextlib
import importlib
import math
import random
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

import exo_mesh
from exo_mesh.domain import fields as marks
from exo_mesh.errors import PeerVersionError
from exo_mesh.wire import message_codec
from exo_mesh.wire.field_forms import one_mark, peeled
from exo_mesh.wire.message_codec import Codec, UnionCodec, hints_of
from exo_mesh.wire.proto import control_pb2 as pb
from exo_mesh.wire.proto import plan_pb2
from tests.support.drawn import drawn, of_class, spoiled
from tests.wire.hostile import HOSTILE

ROOT = Path(exo_mesh.__file__).parent
MADE = r"(?m)^[A-Z_]+(?:: UnionCodec\[.+\])? = (?:Union)?Codec\("


def constants() -> Iterator[Codec[Any, Any] | UnionCodec[Any, Any]]:
    """Every codec of the product, found where it is made."""
    for path in sorted(ROOT.rglob("*.py")):
        if re.search(MADE, path.read_text()):
            module = ".".join(("exo_mesh", *path.relative_to(ROOT).with_suffix("").parts))
            for value in vars(importlib.import_module(module)).values():
                if isinstance(value, Codec | UnionCodec):
                    yield value


CONSTANTS = list(dict.fromkeys(constants()))
UNIONS = {one.message.DESCRIPTOR.name: one for one in CONSTANTS if isinstance(one, UnionCodec)}
ALL = [part for one in CONSTANTS for part in (one.codecs.values() if isinstance(one, UnionCodec) else [one])]
CODECS = {f"{codec.cls.__name__}-{codec.message.DESCRIPTOR.name}": codec for codec in ALL}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def given(cls: type) -> dict[str, Any]:
    """Values of the fields that no message has and that have no default."""
    if issubclass(cls, msgspec.Struct):
        missing = cls.__struct_fields__[: len(cls.__struct_fields__) - len(cls.__struct_defaults__)]
    elif is_dataclass(cls):
        missing = tuple(one.name for one in dataclass_fields(cls) if one.default is one.default_factory is MISSING)
    else:
        return {}
    hints = hints_of(cls)
    return {name: "given" for name in missing if one_mark(peeled(hints[name])[1], marks.NotSent)}


def value_of(codec: Codec[Any, Any], seed: int) -> Any:
    values = given(codec.cls)
    return of_class(codec.cls, random.Random(seed), **values) if values else drawn(codec.cls, random.Random(seed))


def test_each_codec_is_a_constant_of_its_module_and_found() -> None:
    texts = [path.read_text() for path in ROOT.rglob("*.py") if path.name != "message_codec.py"]
    assert len(CONSTANTS) == sum(len(re.findall(MADE, text)) for text in texts) > 20
    assert len(CONSTANTS) == sum(len(re.findall(r"\b(?:Union)?Codec\(", text)) for text in texts)
    assert len(CODECS) == len(ALL)


@pytest.mark.parametrize("union", UNIONS.values(), ids=UNIONS)
def test_each_kind_of_a_message_arrives_as_that_kind(union: UnionCodec[Any, Any]) -> None:
    for name, codec in union.codecs.items():
        value = value_of(codec, 1)
        message = union.message.FromString(union.write(value).SerializeToString())
        assert message.ListFields()[0][0].name == name and union.read(message) == value
    newer = union.message.FromString(bytes([100 << 3 & 0x7F | 0x80, 100 >> 4, 1]))
    assert newer.ByteSize() and union.read(newer) is None, "a newer version may have further kinds"


@every_codec
def test_a_value_arrives_as_it_was(codec: Codec[Any, Any]) -> None:
    seen: dict[str, set[str]] = {name: set() for name in hints_of(codec.cls)}
    for seed in range(20):
        value = value_of(codec, seed)
        there = codec.read(codec.message.FromString(codec.write(value).SerializeToString()), **given(codec.cls))
        assert there == value
        for name in seen:
            seen[name].add(repr(getattr(there, name)))
    hints = hints_of(codec.cls)
    sent = {name for name in seen if not one_mark(peeled(hints[name])[1], marks.NotSent)}
    assert {name for name in sent if seen[name] <= NOTHING} == set(), "something arrives in each field"


NOTHING = {"''", "b''", "0", "0.0", "False", "None", "()", "{}", "frozenset()"}


@dataclass(frozen=True)
class Place:
    """A field with a mark. path: the names of the fields that lead to its message. is_each: the mark is of each item of
    a repeated field."""

    path: tuple[str, ...]
    field: FieldDescriptor
    mark: Any
    is_each: bool = False


def marked(cls: Any, message: Descriptor, path: tuple[str, ...] = ()) -> Iterator[Place]:
    """Every mark on a field of a class, and of the classes inside it, but for classes by hand."""
    if cls in message_codec._by_hand:
        return
    hints = hints_of(cls)
    for name in hints_of(cls):
        inner, found = peeled(hints[name])
        if one_mark(found, marks.Flat):
            yield from marked(inner, message, path)
        elif not one_mark(found, marks.NotSent):
            sent_as = one_mark(found, marks.SentAs)
            yield from _marked(hints[name], message.fields_by_name[sent_as.name if sent_as else name], path)


def _marked(hint: Any, field: FieldDescriptor, path: tuple[str, ...]) -> Iterator[Place]:
    inner, found = peeled(hint)
    if one_mark(found, marks.OnlyValid):
        return  # nothing in them is refused; test_items_that_cannot_be_read_are_left_out
    items = get_args(inner)
    yield from (Place(path, field, mark) for mark in found)
    if field.is_repeated and get_origin(inner) in (tuple, frozenset):
        inner, found = peeled(items[0])
        items = get_args(inner)
        yield from (Place(path, field, mark, is_each=True) for mark in found)
    if field.message_type is None or field.message_type.GetOptions().map_entry:
        return
    path = (*path, field.name)
    if get_origin(inner) is not tuple:
        yield from marked(inner, field.message_type, path)
    elif items[-1] is Ellipsis:
        yield from _marked(inner, field.message_type.fields[0], path)
    else:
        for item, part in zip(items, field.message_type.fields, strict=False):
            if one_mark(peeled(item)[1], marks.Flat):
                yield from marked(peeled(item)[0], field.message_type, path)
            else:
                yield from _marked(item, part, path)


REFUSING = (marks.Range, marks.Size, marks.Newer)
CHANGING = (marks.Cut, marks.Printable, marks.Clamped, marks.Else)
OTHER = (marks.Only, marks.Tidied, marks.FirstBytes, marks.Absent, marks.SentAs, marks.AnyText)
"""Marks of the form of a field. Those that leave something out have tests of their own."""


@every_codec
def test_what_is_outside_a_bound_is_refused_or_changed(codec: Codec[Any, Any]) -> None:
    for place in marked(codec.cls, codec.message.DESCRIPTOR):
        assert isinstance(place.mark, (*REFUSING, *CHANGING, *OTHER)), place
        for wrong in outside(place):
            message = reaching(codec, place)
            put(at(message, place.path), place.field, wrong)
            if isinstance(place.mark, REFUSING):
                error = PeerVersionError if isinstance(place.mark, marks.Newer) else codec.error or ValueError
                with pytest.raises(error, match=place.field.name):
                    codec.read(message, **given(codec.cls))
            else:
                made = codec.write(codec.read(message, **given(codec.cls)))
                found = getattr(at(made, place.path), place.field.name)
                assert all(holds(place.mark, one) for one in (found if place.is_each else [found])), place


@dataclass(frozen=True)
class Items:
    """So many items of a repeated field."""

    number: int


def outside(place: Place) -> Iterator[Any]:
    """What a mark does not allow in its field: a value, or Items."""
    mark, kind = place.mark, place.field.type
    is_text = kind == FieldDescriptor.TYPE_STRING
    letter = "x" if is_text else b"x"
    is_many = place.field.is_repeated and not place.is_each
    match mark:
        case marks.Range(least, most) if kind in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            bounds = [bound for bound in (least - 1, most + 1) if math.isfinite(bound)]
            yield from (math.nan, math.inf, -math.inf, *bounds)
        case marks.Range(_, most):
            yield most + 1
        case marks.Size(most, least, sizes):
            longest = max(sizes, default=most)
            yield Items(longest + 1) if is_many else letter * (longest + 1)
            yield from [letter * (least - 1)] if least else []
        case marks.Cut(most):
            yield Items(most + 1) if is_many else letter * (most + 1)
        case marks.Printable():
            yield HOSTILE
        case marks.Clamped(least, most):
            yield from (least - 1, most + 1)
        case marks.Else() | marks.Newer():
            yield "unheard of" if is_text else 99


def holds(mark: Any, found: Any) -> bool:
    match mark:
        case marks.Cut(most):
            return len(found) <= most
        case marks.Printable(most):
            return bool(found.isprintable() and len(found) <= most)
        case marks.Clamped(least, most):
            return bool(least <= found <= most)
    return found not in ("unheard of", 99)


def reaching(codec: Codec[Any, Any], place: Place) -> Any:
    """A message in which the message of a place exists."""
    for seed in range(100):
        if at(drawn_message(codec, seed), place.path) is not None:
            return codec.message.FromString(drawn_message(codec, seed).SerializeToString())
    raise AssertionError(f"no draw reaches {place}")


@cache
def drawn_message(codec: Codec[Any, Any], seed: int) -> Any:
    return codec.write(value_of(codec, seed))


def at(message: Any, path: tuple[str, ...]) -> Any:
    """The message at the end of a path; None if it does not exist."""
    for name in path:
        field = message.DESCRIPTOR.fields_by_name[name]
        value = getattr(message, name)
        if field.is_repeated and not len(value):
            return None
        if not field.is_repeated and not message.HasField(name):
            return None
        message = value[0] if field.is_repeated else value
    return message


def put(message: Any, field: FieldDescriptor, wrong: Any) -> None:
    held = getattr(message, field.name)
    if not field.is_repeated:
        setattr(message, field.name, wrong)
    elif not isinstance(wrong, Items):
        held.append(wrong)
    elif field.message_type is None:
        one = {FieldDescriptor.TYPE_STRING: "x", FieldDescriptor.TYPE_BYTES: b"x"}.get(field.type, 1)
        held.extend([one] * wrong.number)
    elif field.message_type.GetOptions().map_entry:
        held.update({f"k{number}": 1 for number in range(wrong.number)})
    else:
        held.extend([held[0] if len(held) else held.add()] * wrong.number)


def test_items_that_cannot_be_read_are_left_out() -> None:
    good = pb.OwnerSummary(owner="a", state=pb.PEER_STATE_ALIVE, incarnation=3)
    newer = pb.OwnerSummary(owner="a", state=99)  # type: ignore[arg-type]
    long = pb.OwnerSummary(owner="a" * 65, state=pb.PEER_STATE_ALIVE)
    record = pb.Record(kind="download", id="m", owner="a", version=5, download=pb.DownloadInfo(model="m"))
    empty = pb.Record(kind="download", id="m", owner="a", version=6)
    message = pb.ExchangeReply(summary=[newer, good, long], newer=[empty, record], updates=[pb.PeerUpdate()])
    read = CODECS["ExchangeReply-ExchangeReply"].read(message)
    assert [(one.owner, one.life.incarnation) for one in read.summary] == [("a", 3)]
    assert [one.version for one in read.newer] == [5] and read.updates == ()


@every_codec
def test_a_hostile_message_is_read_or_refused(codec: Codec[Any, Any]) -> None:
    rng = random.Random(5)
    for seed in range(8):
        message = codec.message.FromString(drawn_message(codec, seed).SerializeToString())
        spoiled(message, rng)
        with contextlib.suppress(PeerVersionError, codec.error or ValueError):
            codec.read(message, **given(codec.cls))


@dataclass(frozen=True)
class Forgetful:
    counter: int


@dataclass(frozen=True)
class Inventive:
    counter: int
    proposer: str
    wish: str


@pytest.mark.parametrize(("cls", "name"), [(Forgetful, "proposer"), (Inventive, "wish")])
def test_a_field_without_a_counterpart_is_found_at_the_first_use(cls: Any, name: str) -> None:
    with pytest.raises(AssertionError, match=name):
        Codec(cls, plan_pb2.Ballot).read(plan_pb2.Ballot())

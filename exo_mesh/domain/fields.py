"""Marks for the fields of records: what a peer may send in a field, and how the field stands in a message. Pure.

A mark stands in the annotation of a field, `priority: Annotated[int, Clamped(-11, 10)] = 0`, and is applied by
exo_mesh.wire.message_codec. Without a mark a field has the name and the value that it has in the message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from exo_mesh.base.printable import MAX_CHARS


class Range(msgspec.Struct, frozen=True):
    """A number outside is refused, and so is NaN. An infinite bound allows every finite number. In front of a tuple of
    numbers it holds for each of them."""

    least: float
    most: float


class Size(msgspec.Struct, frozen=True):
    """A text, bytes or a tuple of another length is refused. Text that travels as bytes is measured in bytes. sizes:
    instead of a range, the only lengths that are accepted."""

    most: int = 0
    least: int = 0
    sizes: tuple[int, ...] = ()


class Cut(msgspec.Struct, frozen=True):
    """Only this many characters, items or entries are read and written."""

    most: int


class Printable(msgspec.Struct, frozen=True):
    """The text is made printable, and cut."""

    most: int = MAX_CHARS


class Clamped(msgspec.Struct, frozen=True):
    """A number outside becomes the nearest one inside."""

    least: int
    most: int


class Else(msgspec.Struct, frozen=True):
    """An unknown value becomes `otherwise`. known: the values of a field whose type does not list them."""

    otherwise: Any
    known: Collection[Any] = ()


class Newer(msgspec.Struct, frozen=True):
    """An unknown value means that the sender has a newer version, and is refused with PeerVersionError."""


class Only(msgspec.Struct, frozen=True):
    """Items for which the function is false are left out."""

    accepts: Callable[[Any], bool]


class OnlyValid(msgspec.Struct, frozen=True):
    """Items that break a bound, or that this version does not know, are left out."""


class Tidied(msgspec.Struct, frozen=True):
    """The value that was read is replaced by the function's result."""

    tidy: Callable[[Any], Any]


class FirstBytes(msgspec.Struct, frozen=True):
    """Only as many names are written as fit into this many bytes. The names are texts, or the first items of tuples."""

    most: int


class Absent(msgspec.Struct, frozen=True):
    """The value that is not sent: an absent field stands for it."""

    value: Any


class SentAs(msgspec.Struct, frozen=True):
    """The name of the field in the message."""

    name: str


class AnyText(msgspec.Struct, frozen=True):
    """Text that travels as bytes and may have lone halves of surrogate pairs, as in JSON."""


class Flat(msgspec.Struct, frozen=True):
    """The fields of this value are fields of the message around it."""


class NotSent(msgspec.Struct, frozen=True):
    """No message has this field. Its default counts, or the value that the reader of the message adds."""

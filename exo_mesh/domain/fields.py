"""Marks for the fields of dataclasses: what a peer may send in a field, and how the field stands in a message. Pure.

A mark stands in the annotation of a field, `priority: Annotated[int, Clamped(-11, 10)] = 0`, and is applied by
exo_mesh.wire.message_codec. Without a mark a field has the name and the value that it has in the message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from exo_mesh.base.printable import MAX_CHARS


@dataclass(frozen=True)
class Range:
    """A number outside is refused, and so is NaN. An infinite bound allows every finite number. In front of a tuple of
    numbers it holds for each of them."""

    least: float
    most: float


@dataclass(frozen=True)
class Size:
    """A text, bytes or a tuple of another length is refused. Text that travels as bytes is measured in bytes. sizes:
    instead of a range, the only lengths that are accepted."""

    most: int = 0
    least: int = 0
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cut:
    """Only this many characters, items or entries are read and written."""

    most: int


@dataclass(frozen=True)
class Printable:
    """The text is made printable, and cut."""

    most: int = MAX_CHARS


@dataclass(frozen=True)
class Clamped:
    """A number outside becomes the nearest one inside."""

    least: int
    most: int


@dataclass(frozen=True)
class Else:
    """An unknown value becomes `otherwise`. known: the values of a field whose type does not list them."""

    otherwise: Any
    known: Collection[Any] = ()


@dataclass(frozen=True)
class Newer:
    """An unknown value means that the sender has a newer version, and is refused with PeerVersionError."""


@dataclass(frozen=True)
class Only:
    """Items for which the function is false are left out."""

    accepts: Callable[[Any], bool]


@dataclass(frozen=True)
class OnlyValid:
    """Items that break a bound, or that this version does not know, are left out."""


@dataclass(frozen=True)
class Tidied:
    """The value that was read is replaced by the function's result."""

    tidy: Callable[[Any], Any]


@dataclass(frozen=True)
class FirstBytes:
    """Only as many names are written as fit into this many bytes. The names are texts, or the first items of tuples."""

    most: int


@dataclass(frozen=True)
class Absent:
    """The value that is not sent: an absent field stands for it."""

    value: Any


@dataclass(frozen=True)
class SentAs:
    """The name of the field in the message."""

    name: str


@dataclass(frozen=True)
class AnyText:
    """Text that travels as bytes and may have lone halves of surrogate pairs, as in JSON."""


@dataclass(frozen=True)
class Flat:
    """The fields of this value are fields of the message around it."""


@dataclass(frozen=True)
class NotSent:
    """No message has this field. Its default counts, or the value that the reader of the message adds."""

"""Layer ranges of a model: held by a stage, or partly on a machine's disk."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.engine_speed import DIGEST_CHARS
from exo_mesh.domain.fields import Absent, Cut, Only, Printable, Tidied

MAX_KEYS = 4
"""Most file keys of one KeptLayers: the keys of the last used files."""

MAX_KEPT = 32
"""Most parts of one model that a peer can have on its disk; the rest is cut off."""

MAX_NAME_CHARS = 64


class Shard(msgspec.Struct, frozen=True):
    """The half-open layer range `[start, stop)` of a model with `num_layers` layers.

    The first shard also embeds; the last also norms, projects and samples.
    """

    model: str
    start: int
    stop: int
    num_layers: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.num_layers:
            raise ValueError(f"no layers in [{self.start}, {self.stop}) of {self.num_layers}")

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_layers

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.model}[{self.start}:{self.stop}/{self.num_layers}]"


class KeptLayers(msgspec.Struct, frozen=True, order=True):
    """Layers `[start, stop)` of a model with KV or weights on a peer's disk.

    tokens: positions of the KV in files of the prefix cache, rounded down to a power of two, so that it seldom changes;
    0: this is about weights. engine, activation_dtype: what computed the KV, and for which kind of ring; see
    Plan.activation_dtype. rank, size: of the tensor group that it was computed in.
    keys: the first 8 bytes of the keys of the files that were used last, as numbers in ascending order, MAX_KEYS at
    most. All stages of a ring, and all ranks of a stage, name their files of a prompt by the same key. () for weights,
    and from peers of older versions.
    """

    engine: Annotated[str, Printable(MAX_NAME_CHARS)]
    start: int
    stop: int
    tokens: int = 0
    activation_dtype: Annotated[str, Printable(MAX_NAME_CHARS)] = ""
    rank: int = 0
    size: Annotated[int, Absent(1)] = 1
    keys: Annotated[tuple[int, ...], Cut(MAX_KEYS)] = ()

    @property
    def is_possible(self) -> bool:
        """Whether there are layers, and the rank is one of the group."""
        return self.start < self.stop and self.rank < self.size

    @property
    def tidied(self) -> KeptLayers:
        """The same with its keys in order, each once, and without keys if it is about weights."""
        return replace(self, keys=tuple(sorted(set(self.keys))) if self.tokens else ()) if self.keys else self


Kept = Annotated[
    tuple[Annotated[KeptLayers, Tidied(attrgetter("tidied"))], ...], Cut(MAX_KEPT), Only(attrgetter("is_possible"))
]
"""Parts of one model as a peer may send them."""

KeptOfModel = tuple[Annotated[str, Printable(DIGEST_CHARS)], Kept]
"""The first DIGEST_CHARS characters of a model's digest, and the parts of that model."""

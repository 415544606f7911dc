"""Layer ranges of a model: held by a stage, or partly on a machine's disk."""

from __future__ import annotations

from dataclasses import dataclass

MAX_KEYS = 4
"""Most file keys of one KeptLayers: the keys of the last used files."""


@dataclass(frozen=True, slots=True)
class Shard:
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


@dataclass(frozen=True, slots=True, order=True)
class KeptLayers:
    """Layers `[start, stop)` of a model with KV or weights on a peer's disk.

    tokens: positions of the KV in files of the prefix cache, rounded down to a power of two, so that it seldom changes;
    0: this is about weights. engine, activation_dtype: what computed the KV, and for which kind of ring; see
    Plan.activation_dtype. rank, size: of the tensor group that it was computed in.
    keys: the first 8 bytes of the keys of the files that were used last, as numbers in ascending order, MAX_KEYS at
    most. All stages of a ring, and all ranks of a stage, name their files of a prompt by the same key. () for weights,
    and from peers of older versions.
    """

    engine: str
    start: int
    stop: int
    tokens: int = 0
    activation_dtype: str = ""
    rank: int = 0
    size: int = 1
    keys: tuple[int, ...] = ()

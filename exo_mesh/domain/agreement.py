"""May stages of two engines stand in one ring? Decided from what both made of equal inputs; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

MAX_DIFFERENCE = 1e-3
"""Largest difference of any value, relative to the root mean square of all. Engines that compute the same in float32
differ by about 1e-6; one that leaves out a window, or a scale, differs by 1e-2 and more (measured on 23 models)."""

NOT_NUMBERS = 1e99
"""A difference that is infinite or not a number; JSON has neither."""

WIDEST_FIRST = ("float32", "bfloat16", "float16")

TensorShape = tuple[str, tuple[int, ...]]
"""Name of a tensor that crosses a hop, and its shape per token."""


@dataclass(frozen=True, slots=True)
class RangeReport:
    """What an engine made of the layers `[start, stop)`.

    outputs: flat float32 values by name. inputs, given: tensors that it takes and hands on, as declared; empty if the
    engine does not declare them, or at either end of the model.
    """

    start: int
    stop: int
    outputs: Mapping[str, np.ndarray]
    inputs: tuple[TensorShape, ...] = ()
    given: tuple[TensorShape, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """A self-test of one engine. native_dtype: of the activations that it hands on in a ring of its own."""

    engine: str
    native_dtype: str
    ranges: tuple[RangeReport, ...]


@dataclass(frozen=True, slots=True)
class AgreementVerdict:
    """reason: why the two must not share a ring, "" if they may. difference: the largest that was measured."""

    reason: str
    difference: float


def compare(one: Report, other: Report, kind_of: Mapping[int, str]) -> AgreementVerdict:
    """kind_of: what to call the layers of a range, by its first one."""
    worst = 0.0
    if [(r.start, r.stop) for r in one.ranges] != [(r.start, r.stop) for r in other.ranges]:
        return AgreementVerdict(f"{one.engine} and {other.engine} were not tested with the same layers", worst)
    for mine, theirs in zip(one.ranges, other.ranges, strict=True):
        where = _where(mine, kind_of)
        if defect := _boundary_defect(one, mine, other, theirs):
            return AgreementVerdict(f"{defect} {where}", worst)
        for name in sorted(mine.outputs.keys() | theirs.outputs.keys()):
            a, b = mine.outputs.get(name), theirs.outputs.get(name)
            if a is None or b is None or a.shape != b.shape:
                sizes = [0 if values is None else values.size for values in (a, b)]
                return AgreementVerdict(
                    f"{one.engine} gives {sizes[0]} and {other.engine} {sizes[1]} values of {name!r} {where}", worst
                )
            worst = max(worst, difference(a, b))
            if worst == NOT_NUMBERS:
                return AgreementVerdict(
                    f"{one.engine} or {other.engine} gives values that are no numbers {where}", worst
                )
            if worst > MAX_DIFFERENCE:
                return AgreementVerdict(
                    f"{one.engine} and {other.engine} differ by {worst:.1e} of the typical value {where} "
                    f"({MAX_DIFFERENCE:.0e} is allowed)",
                    worst,
                )
    return AgreementVerdict("", worst)


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """Largest difference relative to the root mean square of `other`; NOT_NUMBERS if there is none."""
    if not one.size:
        return 0.0
    a, b = one.astype(np.float64), other.astype(np.float64)
    scale = float(np.sqrt(np.mean(b * b)))
    largest = float(np.max(np.abs(a - b)))
    if not np.isfinite(largest) or not np.isfinite(scale):
        return NOT_NUMBERS
    return largest / max(scale, 1e-30)


def boundary_defect(given: Sequence[TensorShape], taken: Sequence[TensorShape]) -> str:
    """Why what one stage hands on is not what the next one takes, or "". Nothing declared counts as anything."""
    if not given or not taken or dict(given) == dict(taken):
        return ""
    return f"one hands on {_listed(given)}, the other takes {_listed(taken)}"


def ranges_to_test(
    num_layers: int, legal_cuts: Iterable[int], kinds: Iterable[Sequence[str]], most: int
) -> list[tuple[int, int]]:
    """The first and the last piece between legal cuts, and the first one with each further kind of layer.

    At most `most` of them. kinds: per engine, the kind of each layer as that engine has it; empty if it does not say.
    """
    edges = sorted({0, num_layers, *(cut for cut in legal_cuts if 0 < cut < num_layers)})
    pieces = list(pairwise(edges))
    chosen = {pieces[0], pieces[-1]}
    for names in kinds:
        seen = {names[layer] for start, stop in chosen for layer in range(start, stop)} if names else set()
        for piece in pieces if names else ():
            new = set(names[piece[0] : piece[1]]) - seen
            if new and len(chosen) < most:
                chosen.add(piece)
                seen |= new
    return sorted(chosen)


def common_dtype(native: Iterable[str], accepted: Iterable[Iterable[str]]) -> str:
    """The widest of the engines' own activation dtypes that all of them take; "" if there is none."""
    taken = set(WIDEST_FIRST).intersection(*(set(dtypes) for dtypes in accepted))
    return next((dtype for dtype in WIDEST_FIRST if dtype in set(native) & taken), "")


def _where(part: RangeReport, kind_of: Mapping[int, str]) -> str:
    layers = f"layer {part.start}" if part.stop == part.start + 1 else f"layers {part.start} to {part.stop - 1}"
    kind = kind_of.get(part.start, "")
    return f"in {layers} ({kind})" if kind else f"in {layers}"


def _boundary_defect(one: Report, mine: RangeReport, other: Report, theirs: RangeReport) -> str:
    for what, left, right in (("take", mine.inputs, theirs.inputs), ("hand on", mine.given, theirs.given)):
        if left and right and dict(left) != dict(right):
            return f"{one.engine} and {other.engine} {what} different tensors: {_listed(left)} and {_listed(right)}"
    return ""


def _listed(tensors: Sequence[TensorShape]) -> str:
    return ", ".join(f"{name}{list(shape)}" for name, shape in tensors)

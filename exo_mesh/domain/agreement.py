"""Decides whether stages of two engines may share a ring, from what both computed for equal inputs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # a node does not import NumPy: it would take a sixth of its start
    import numpy as np

MAX_DIFFERENCE = 1e-3
"""Largest difference, relative to the root mean square of all values. Engines that compute the same in float32 differ
by about 1e-6; an engine that omits a window or a scale differs by 1e-2 and more (measured on 23 models)."""

NOT_NUMBERS = 1e99
"""Stands for a difference that is infinite or not a number, because JSON can express neither."""

WIDEST_FIRST = ("float32", "bfloat16", "float16")

TensorShape = tuple[str, tuple[int, ...]]
"""Name of a tensor that crosses a hop, and its shape per token."""


class RangeReport(msgspec.Struct, frozen=True):
    """The values that an engine computed for the layers `[start, stop)`.

    outputs: flat float32 values by name. inputs, given: the tensors that the engine declares to take from the stage
    before and to pass to the next stage; empty if the engine does not declare them, or at either end of the model.
    """

    start: int
    stop: int
    outputs: Mapping[str, np.ndarray]
    inputs: tuple[TensorShape, ...] = ()
    given: tuple[TensorShape, ...] = ()


class Report(msgspec.Struct, frozen=True):
    """The result of one engine's self-test. native_dtype: of the activations that it passes on in a ring of its own."""

    engine: str
    native_dtype: str
    ranges: tuple[RangeReport, ...]


class AgreementVerdict(msgspec.Struct, frozen=True):
    """The result of a comparison. reason: why the two engines must not share a ring, "" if they may. difference: the
    largest that was measured."""

    reason: str
    difference: float


def compare(one: Report, other: Report, kind_of: Mapping[int, str]) -> AgreementVerdict:
    """Compares the self-tests of two engines. kind_of: the kind of the layers of a range, by its first layer."""
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
                    f'{one.engine} gives {sizes[0]} and {other.engine} {sizes[1]} values for "{name}" {where}', worst
                )
            worst = max(worst, difference(a, b))
            if worst == NOT_NUMBERS:
                return AgreementVerdict(
                    f"{one.engine} or {other.engine} gives values that are not finite {where}", worst
                )
            if worst > MAX_DIFFERENCE:
                return AgreementVerdict(
                    f"{one.engine} and {other.engine} differ by {worst:.1e} of the root mean square {where} "
                    f"({MAX_DIFFERENCE:.0e} is allowed)",
                    worst,
                )
    return AgreementVerdict("", worst)


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference relative to the root mean square of `other`; NOT_NUMBERS if it is not finite."""
    import numpy as np

    if not one.size:
        return 0.0
    a, b = one.astype(np.float64), other.astype(np.float64)
    scale = float(np.sqrt(np.mean(b * b)))
    largest = float(np.max(np.abs(a - b)))
    if not np.isfinite(largest) or not np.isfinite(scale):
        return NOT_NUMBERS
    return largest / max(scale, 1e-30)


def boundary_defect(given: Sequence[TensorShape], taken: Sequence[TensorShape]) -> str:
    """Says why the tensors that one stage passes on do not fit the next one; "" if they do. Empty fits all."""
    if not given or not taken or dict(given) == dict(taken):
        return ""
    return f"one stage passes on {_listed(given)}, the next one takes {_listed(taken)}"


def ranges_to_test(
    num_layers: int, legal_cuts: Iterable[int], kinds: Iterable[Sequence[str]], most: int
) -> list[tuple[int, int]]:
    """Chooses layer ranges for a self-test: the first and last piece between legal cuts, and one per further layer
    kind.

    At most `most` ranges. kinds: per engine, the kind of each layer as that engine names it; empty if the engine does
    not say.
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
    """The widest of the engines' own activation dtypes that every engine accepts; "" if there is none."""
    taken = set(WIDEST_FIRST).intersection(*(set(dtypes) for dtypes in accepted))
    return next((dtype for dtype in WIDEST_FIRST if dtype in set(native) & taken), "")


def _where(part: RangeReport, kind_of: Mapping[int, str]) -> str:
    layers = f"layer {part.start}" if part.stop == part.start + 1 else f"layers {part.start} to {part.stop - 1}"
    kind = kind_of.get(part.start, "")
    return f"in {layers} ({kind})" if kind else f"in {layers}"


def _boundary_defect(one: Report, mine: RangeReport, other: Report, theirs: RangeReport) -> str:
    for what, left, right in (("take", mine.inputs, theirs.inputs), ("pass on", mine.given, theirs.given)):
        if left and right and dict(left) != dict(right):
            return f"{one.engine} and {other.engine} {what} different tensors: {_listed(left)} and {_listed(right)}"
    return ""


def _listed(tensors: Sequence[TensorShape]) -> str:
    return ", ".join(f"{name}{list(shape)}" for name, shape in tensors)

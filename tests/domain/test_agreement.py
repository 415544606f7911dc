"""When two engines may share a ring: what both made of equal inputs must be nearly equal, and fit at the boundary."""

from __future__ import annotations

import numpy as np
import pytest

from exo_mesh.domain.agreement import (
    MAX_DIFFERENCE,
    NOT_NUMBERS,
    RangeReport,
    Report,
    TensorShape,
    boundary_defect,
    common_dtype,
    compare,
    difference,
    ranges_to_test,
)

KINDS = {0: "full", 4: "window"}


def report(
    engine: str, change: float = 0.0, *, start: int = 4, name: str = "hidden", given: tuple[TensorShape, ...] = ()
) -> Report:
    """Of layer 0 and of layer `start`, whose last value is off by `change`."""
    first, last = np.ones(400, np.float32), np.ones(400, np.float32)
    last[-1] += change
    return Report(
        engine,
        "float32",
        (RangeReport(0, 1, {"hidden": first}), RangeReport(start, start + 1, {name: last}, given=given)),
    )


def test_what_differs_by_rounding_may_be_mixed_and_the_difference_is_told() -> None:
    verdict = compare(report("a", 1e-6), report("b"), KINDS)
    assert not verdict.reason and verdict.difference == pytest.approx(1e-6, rel=0.05)


def test_one_value_that_is_off_is_enough_to_refuse_and_its_layer_is_named() -> None:
    assert not compare(report("a", 0.9 * MAX_DIFFERENCE), report("b"), KINDS).reason
    verdict = compare(report("a", 0.02), report("b"), KINDS)
    assert verdict.reason == "a and b differ by 2.0e-02 of the root mean square in layer 4 (window) (1e-03 is allowed)"


def test_the_difference_is_relative_to_the_typical_value() -> None:
    values = np.full(100, 50.0, np.float32)
    assert difference(values + 1, values) == pytest.approx(0.02)
    assert difference(np.zeros(0, np.float32), np.zeros(0, np.float32)) == 0
    for odd in (np.nan, np.inf):
        assert difference(np.array([1, odd], np.float32), np.array([1, 1], np.float32)) == NOT_NUMBERS
    broken = compare(report("a", float("nan")), report("b"), KINDS)
    assert "not finite in layer 4" in broken.reason and broken.difference == NOT_NUMBERS


def test_other_tensors_other_sizes_and_other_layers_are_refused() -> None:
    assert '400 and b 0 values for "hidden"' in compare(report("a"), report("b", name="v_first"), KINDS).reason
    assert "not tested with the same layers" in compare(report("a"), report("b", start=5), KINDS).reason
    wide, narrow = (("hidden", (64,)),), (("hidden", (64,)), ("v_first", (64,)))
    reason = compare(report("a", given=wide), report("b", given=narrow), KINDS).reason
    assert reason == "a and b pass on different tensors: hidden[64] and hidden[64], v_first[64] in layer 4 (window)"
    assert not compare(report("a", given=wide), report("b"), KINDS).reason, "one that declares nothing is believed"


def test_a_boundary_fits_by_name_and_shape_in_any_order() -> None:
    both = (("hidden", (64,)), ("v_first", (64,)))
    assert not boundary_defect(both, both[::-1])
    assert not boundary_defect((), both) and not boundary_defect(both, ())
    assert (
        boundary_defect(both[:1], (("hidden", (128,)),))
        == "one stage passes on hidden[64], the next one takes hidden[128]"
    )


@pytest.mark.parametrize(
    ("layers", "cuts", "kinds", "expected"),
    [
        (6, range(1, 6), [], [(0, 1), (5, 6)]),
        (6, range(1, 6), [("f", "w", "f", "w", "w", "w")], [(0, 1), (5, 6)]),
        (6, range(1, 6), [("f", "w", "f", "x", "f", "f")], [(0, 1), (1, 2), (3, 4), (5, 6)]),
        (6, range(1, 6), [("f",) * 6, ("f", "f", "y", "f", "f", "f")], [(0, 1), (2, 3), (5, 6)]),
        (8, (4,), [("f", "w") * 4], [(0, 4), (4, 8)]),
        (8, (), [("f", "w") * 4], [(0, 8)]),
        (1, (), [()], [(0, 1)]),
    ],
)
def test_the_ends_and_one_layer_of_each_kind_are_tested(
    layers: int, cuts: tuple[int, ...], kinds: list[tuple[str, ...]], expected: list[tuple[int, int]]
) -> None:
    assert ranges_to_test(layers, cuts, kinds, most=8) == expected


def test_kinds_without_end_are_tested_up_to_a_bound() -> None:
    found = ranges_to_test(40, range(1, 40), [[str(layer) for layer in range(40)]], most=8)
    assert len(found) == 8 and found[0] == (0, 1) and found[-1] == (39, 40)


@pytest.mark.parametrize(
    ("native", "accepted", "expected"),
    [
        (["bfloat16", "float32"], [["float32", "bfloat16"], ["float32"]], "float32"),
        (["bfloat16", "bfloat16"], [["float32", "bfloat16"], ["float32", "bfloat16"]], "bfloat16"),
        (["bfloat16", "float16"], [["float16", "bfloat16"]] * 2, "bfloat16"),
        (["float32", "bfloat16"], [["bfloat16"], ["bfloat16", "float32"]], "bfloat16"),
        (["uint32", "float32"], [["uint32"], ["float32"]], ""),
    ],
)
def test_activations_go_in_the_widest_dtype_of_one_that_all_take(
    native: list[str], accepted: list[list[str]], expected: str
) -> None:
    assert common_dtype(native, accepted) == expected

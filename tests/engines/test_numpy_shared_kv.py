"""The KV of the NumPy engine in parts that sequences share; test_shared_kv.py has what every engine must show."""

from __future__ import annotations

import random

import numpy as np
import pytest
from exo_mesh_numpy.kv import LEAST_SHARED, STEP, Assembly, SequenceKv


def test_who_holds_a_part_alone_has_it_in_own_memory_again() -> None:
    assembly = Assembly()
    one, other = (SequenceKv(2, 1, 4, 2000, assembly) for _ in range(2))
    one.begin_row(0, 600)
    other.take(one, 600)
    assert other.parts and other.parts == one.parts
    one.release()
    other.begin_row(600, 1)
    assert not other.parts and other.length == 601


def test_a_short_beginning_is_copied() -> None:
    assembly = Assembly()
    one, other = (SequenceKv(2, 1, 4, 2000, assembly) for _ in range(2))
    one.begin_row(0, LEAST_SHARED + 50)
    other.take(one, LEAST_SHARED - 1)
    assert not other.parts and other.length == LEAST_SHARED - 1


@pytest.mark.parametrize("seed", range(5))
def test_any_tree_of_copies_holds_the_right_values(seed: int) -> None:
    """Each value written is a number of its own; a plain list of them is what each sequence must hold."""
    rng, assembly = random.Random(seed), Assembly()
    held: dict[int, tuple[SequenceKv, list[float]]] = {}
    for number in range(300):
        kind = rng.random()
        if kind < 0.2 or not held:
            held[number] = SequenceKv(2, 1, 4, 5000, assembly), []
        elif kind < 0.5:
            source, values = held[rng.choice(list(held))]
            upto = rng.choice([len(values), rng.randrange(len(values) + 1)])
            copy = SequenceKv(2, 1, 4, 5000, assembly)
            copy.take(source, upto)
            held[number] = copy, values[:upto]
        elif kind < 0.6:
            held.pop(rng.choice(list(held)))[0].release()
        else:
            kv, values = held[rng.choice(list(held))]
            pos0 = rng.choice([len(values), len(values), rng.randrange(len(values) + 1)])
            new = [float(number * 1000 + place) for place in range(rng.choice([1, 7, 300]))]
            kv.begin_row(pos0, len(new))
            values[pos0:] = new
            rows = np.repeat(np.array(new, np.float32)[:, None], 8, 1).reshape(-1, 2, 4)
            for layer in range(2):
                keys, kept = kv.write(layer, pos0, rows + layer)
                for part in (keys, kept):
                    assert part.shape[1] % STEP == 0
                    np.testing.assert_array_equal(part[0, : len(values), 0], np.array(values, np.float32) + layer)
    for kv, values in held.values():
        np.testing.assert_array_equal(kv.values(1, 0, len(values))[1, :, 2], np.array(values, np.float32) + 1)
    parts = {part.serial: part for kv, _ in held.values() for part in kv.parts}
    for serial, shared in parts.items():
        assert shared.holders == sum(one.serial == serial for kv, _ in held.values() for one in kv.parts)

"""Sequences of the NumPy engine that begin alike hold the beginning once, and compute the same bits as alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from exo_mesh_numpy.engine import NumpyStage
from exo_mesh_numpy.kv import LEAST_SHARED, STEP, Assembly, SequenceKv

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import StageInput
from tests.engines.serving_ways import flat_model
from tests.support.serving import load_stages

PROMPT = tuple(3 + (7 * place) % 50 for place in range(1000))


@pytest.fixture(scope="module", params=["deterministic", "fast"])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumpyStage]:
    (made,) = load_stages("numpy", flat_model(tmp_path_factory.mktemp("model")), (), {"mode": request.param})
    assert isinstance(made, NumpyStage)
    yield made
    made.close()


@pytest.fixture
def is_exact(stage: NumpyStage) -> bool:
    return stage.capabilities.row_exact


def compute(stage: NumpyStage, sequence: int, pos0: int, tokens: tuple[int, ...]) -> np.ndarray:
    output = stage.forward(StageInput((Row(sequence, pos0, len(tokens), 1),), tokens, {}))
    assert not output.faults and output.logits is not None
    return output.logits


def test_thirty_two_streams_over_one_prompt_hold_it_once(stage: NumpyStage) -> None:
    before = stage.memory_bytes()
    stage.insert(1, 2000)
    compute(stage, 1, 0, PROMPT)
    one_copy = stage.memory_bytes() - before
    for sequence in range(2, 34):
        stage.copy(1, sequence, len(PROMPT), 2000)
    stage.remove(1)
    assert stage.memory_bytes() - before <= 1.1 * one_copy
    own = STEP * one_copy / len(PROMPT)
    rows = tuple(Row(sequence, len(PROMPT), 1, 1) for sequence in range(2, 34))
    stage.forward(StageInput(rows, (5,) * 32, {}))
    assert stage.memory_bytes() - before <= 1.1 * one_copy + 32 * own, "and a step of its own for each"
    for sequence in range(2, 34):
        stage.remove(sequence)
    assert stage.memory_bytes() == before


def test_shared_sequences_compute_what_each_computes_alone(stage: NumpyStage, is_exact: bool) -> None:
    """Also after the one that had computed the prompt has gone on, has been cut back, and has ended."""
    stage.insert(1, 2000)
    compute(stage, 1, 0, PROMPT[:700])
    stage.copy(1, 2, 700, 2000)
    stage.copy(1, 3, 400, 2000)
    compute(stage, 1, 700, PROMPT[700:])
    stage.copy(1, 4, 1000, 2000)
    compute(stage, 1, 300, (9, 9, 9))
    stage.remove(1)
    for sequence, length in ((2, 700), (3, 400), (4, 1000), (4, 1001), (2, 100)):
        tokens = (5,) if length == 1001 else (5, 6)
        stage.insert(9, 2000)
        context = (*PROMPT, 5)[:length]
        compute(stage, 9, 0, context)
        wanted = compute(stage, 9, length, tokens)
        got = compute(stage, sequence, length, tokens)
        if is_exact:
            np.testing.assert_array_equal(got, wanted)
        else:
            np.testing.assert_allclose(got, wanted, atol=1e-3)
        stage.remove(9)
    for sequence in (2, 3, 4):
        stage.remove(sequence)


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

"""Sequences of the torch engine that begin alike hold the beginning once, and compute what each computes alone."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from exo_mesh_torch import provider
from exo_mesh_torch.engine import TorchStage

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import LEAST_SHARED, MOST_PARTS, StageInput
from tools.architectures.torch_families import NUM_LAYERS
from tools.architectures.torch_models import write_random_model
from tools.stages import Stages

PROMPT = tuple(3 + (7 * place) % 50 for place in range(1000))
TOLERANCE = 1e-4


def open_stage(directory: Path, family: str) -> TorchStage:
    stages = Stages(provider, write_random_model(directory, family), NUM_LAYERS, threads="1")
    (stage,) = stages.ring(())
    assert isinstance(stage, TorchStage)
    return stage


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchStage]:
    made = open_stage(tmp_path_factory.mktemp("model"), "llama")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_is_left(stage: TorchStage) -> Iterator[None]:
    before = stage.memory_bytes()
    yield
    for sequence in stage.sequences():
        stage.remove(sequence)
    assert stage.memory_bytes() == before


def compute(stage: TorchStage, *rows: tuple[int, int, tuple[int, ...]]) -> np.ndarray:
    """The logits of the last position of each row (sequence, pos0, tokens)."""
    ids = tuple(token for _, _, tokens in rows for token in tokens)
    output = stage.forward(
        StageInput(tuple(Row(sequence, pos0, len(tokens), 1) for sequence, pos0, tokens in rows), ids, {})
    )
    assert not output.faults and output.logits is not None
    return output.logits


def alone(stage: TorchStage, context: tuple[int, ...], tokens: tuple[int, ...]) -> np.ndarray:
    stage.insert(9999, 3000)
    compute(stage, (9999, 0, context))
    logits = compute(stage, (9999, len(context), tokens))
    stage.remove(9999)
    return logits[0]


def begin(stage: TorchStage, length: int = len(PROMPT)) -> None:
    stage.insert(1, 3000)
    compute(stage, (1, 0, PROMPT[:length]))


def test_thirty_two_streams_over_one_prompt_hold_it_once(stage: TorchStage) -> None:
    before = stage.memory_bytes()
    begin(stage)
    one_copy = stage.memory_bytes() - before
    for sequence in range(2, 34):
        stage.copy(1, sequence, len(PROMPT), 2000)
    stage.remove(1)
    assert stage.memory_bytes() - before <= 1.1 * one_copy
    compute(stage, *((sequence, len(PROMPT), (5,)) for sequence in range(2, 34)))
    own = 65 * one_copy / len(PROMPT)
    assert stage.memory_bytes() - before <= 1.1 * one_copy + 32 * own, "and room of its own for each"


def test_the_stage_says_that_it_shares(stage: TorchStage) -> None:
    assert stage.capabilities.shares_from == LEAST_SHARED


def test_rows_with_and_without_shared_parts_decode_together_as_alone(stage: TorchStage) -> None:
    begin(stage)
    stage.copy(1, 2, 1000, 3000)
    stage.copy(1, 3, 400, 3000)
    stage.copy(1, 4, 100, 3000)
    stage.insert(5, 3000)
    compute(stage, (5, 0, PROMPT[:700]))
    stage.insert(6, 3000)
    compute(stage, (6, 0, PROMPT[:3]))
    compute(stage, (4, 100, PROMPT[100:130]))
    held = {1: 1000, 2: 1000, 3: 400, 4: 130, 5: 700, 6: 3}
    context = {sequence: PROMPT[:length] for sequence, length in held.items()}
    for tokens in ((5,), (6, 7), (8,), (9, 10, 11)):
        order = sorted(held, key=lambda sequence: (sequence * tokens[0]) % 7)
        got = compute(stage, *((sequence, len(context[sequence]), tokens) for sequence in order))
        for place, sequence in enumerate(order):
            wanted = alone(stage, context[sequence], tokens)
            np.testing.assert_allclose(got[place], wanted, atol=TOLERANCE, err_msg=f"{sequence} {tokens}")
            context[sequence] += tokens


def test_a_sequence_cut_back_into_its_shared_part_leaves_the_others_as_they_are(stage: TorchStage) -> None:
    begin(stage)
    for sequence in (2, 3):
        stage.copy(1, sequence, 1000, 3000)
    compute(stage, (1, 1000, (5,)), (2, 1000, (5,)), (3, 1000, (6,)))
    got = compute(stage, (1, 300, (9, 8)), (2, 1001, (9, 8)), (3, 999, (9, 8)))
    for place, context in enumerate((PROMPT[:300], (*PROMPT, 5), PROMPT[:999])):
        np.testing.assert_allclose(got[place], alone(stage, context, (9, 8)), atol=TOLERANCE)


def test_a_long_row_follows_its_shared_part(stage: TorchStage) -> None:
    begin(stage, 600)
    stage.copy(1, 2, 600, 3000)
    got = compute(stage, (2, 600, PROMPT[:50]))
    np.testing.assert_allclose(got[0], alone(stage, PROMPT[:600], PROMPT[:50]), atol=TOLERANCE)


def test_a_saved_sequence_has_its_shared_positions(stage: TorchStage) -> None:
    begin(stage, 600)
    stage.copy(1, 2, 600, 3000)
    compute(stage, (2, 600, (5,)))
    stage.restore(3, 3000, stage.save(2))
    got = compute(stage, (3, 601, (6,)))
    np.testing.assert_allclose(got[0], alone(stage, (*PROMPT[:600], 5), (6,)), atol=TOLERANCE)


def test_copies_of_copies_have_few_parts_and_compute_as_alone(stage: TorchStage) -> None:
    begin(stage, 300)
    context = PROMPT[:300]
    for sequence in range(1, MOST_PARTS + 3):
        stage.copy(sequence, sequence + 1, len(context), 3000)
        compute(stage, (sequence + 1, len(context), PROMPT[:260]))
        context += PROMPT[:260]
    got = compute(stage, (sequence + 1, len(context), (5,)), (2, 560, (6,)))
    np.testing.assert_allclose(got[0], alone(stage, context, (5,)), atol=TOLERANCE)
    np.testing.assert_allclose(got[1], alone(stage, context[:560], (6,)), atol=TOLERANCE)


def run_schedule(stage: TorchStage, seed: int, steps: int) -> None:
    """Random copies, moves, rows, cuts and ends, with parts of 8 positions and more; each row is compared."""
    rng = random.Random(seed)
    held: dict[int, tuple[int, ...]] = {}
    for new in range(1, steps):
        kind = rng.random()
        if not held or kind < 0.15:
            held[new] = tuple(rng.randrange(3, 60) for _ in range(rng.choice([5, 30, 90])))
            stage.insert(new, 3000)
            compute(stage, (new, 0, held[new]))
        elif kind < 0.5:
            source = rng.choice(list(held))
            upto = rng.randint(1, len(held[source]))
            held[new] = held[source][:upto]
            if kind < 0.42:
                stage.copy(source, new, upto, 3000)
            else:
                stage.move(source, new, upto, 3000)
                del held[source]
        elif kind < 0.6 and len(held) > 2:
            gone = rng.choice(list(held))
            del held[gone]
            stage.remove(gone)
        else:
            chosen = rng.sample(list(held), rng.randint(1, len(held)))
            n = rng.choice([1, 1, 1, 3, 20])
            rows: list[tuple[int, int, tuple[int, ...]]] = []
            for sequence in chosen:
                pos0 = len(held[sequence]) - (rng.randrange(min(12, len(held[sequence]))) if rng.random() < 0.2 else 0)
                rows.append((sequence, pos0, tuple(rng.randrange(3, 60) for _ in range(n))))
            got = compute(stage, *rows)
            for place, (sequence, pos0, tokens) in enumerate(rows):
                held[sequence] = held[sequence][:pos0] + tokens
                wanted = alone(stage, held[sequence][:pos0], tokens)
                np.testing.assert_allclose(got[place], wanted, atol=TOLERANCE, err_msg=f"seed {seed}, step {new}")


@pytest.fixture
def small_parts(stage: TorchStage) -> Iterator[None]:
    assert stage._batches is not None
    stage._batches.least_shared = 8
    yield
    stage._batches.least_shared = LEAST_SHARED


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("seed", range(2))
def test_random_copies_and_cuts_compute_what_each_sequence_computes_alone(stage: TorchStage, seed: int) -> None:
    run_schedule(stage, seed, 25)


@pytest.mark.extended
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("seed", range(100, 104))
def test_many_random_copies_and_cuts(stage: TorchStage, seed: int) -> None:
    run_schedule(stage, seed + int(os.environ.get("EXO_MESH_TEST_SEED", "0")), 50)
    for sequence in stage.sequences():
        stage.remove(sequence)


@pytest.mark.parametrize(("family", "shares"), [("gemma3_text", False), ("deepseek_v3", False), ("qwen3_next", True)])
def test_the_kinds_of_cache_that_share(tmp_path: Path, family: str, shares: bool) -> None:
    other = open_stage(tmp_path, family)
    assert bool(other.capabilities.shares_from) == shares
    other.insert(1, 3000)
    compute(other, (1, 0, PROMPT[:600]))
    other.copy(1, 2, 600, 3000)
    got = compute(other, (1, 600, (5,)), (2, 600, (6,)))
    other.remove(2)
    for place, token in enumerate((5, 6)):
        np.testing.assert_allclose(got[place], alone(other, PROMPT[:600], (token,)), atol=1e-3)
    other.close()

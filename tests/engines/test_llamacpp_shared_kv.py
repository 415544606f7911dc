"""Sequences of the llama.cpp engine that begin alike hold the beginning once, and compute what each computes alone."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from exo_mesh_llamacpp import loading, provider
from exo_mesh_llamacpp.pools import Pools
from exo_mesh_llamacpp.shared import groups
from exo_mesh_llamacpp.shared.runs import SharedRuns
from exo_mesh_llamacpp.stage import LlamaCppStage

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LEAST_SHARED, LoadRequest, StageInput
from exo_mesh.errors import EngineError
from exo_mesh.weights.random_checkpoint import TinyModel, write_checkpoint
from tools.stages import forward

PROMPT = tuple(3 + (7 * place) % 50 for place in range(1000))
TOLERANCE = 1e-4
SLACK = 0.005
"""The same with keys and values of fewer bits: logits have a standard deviation of about 1."""
LAYERS = 4

pytestmark = pytest.mark.skipif(not provider.availability().available, reason="xllamacpp is not installed")

Tokens = tuple[int, ...]


class Ring:
    """Stages of one model, cut before some layers."""

    def __init__(self, directory: Path, *cuts: int, **options: str) -> None:
        self.stages: list[LlamaCppStage] = []
        for start, stop in zip((0, *cuts), (*cuts, LAYERS), strict=True):
            made = provider.create()
            assert isinstance(made, LlamaCppStage)
            shard = Shard("tiny", start, stop, LAYERS)
            made.load(
                LoadRequest(shard, directory, 4096, {"threads": "1", "kv": "f32", **options}), lambda done, total: None
            )
            self.stages.append(made)

    def each(self, act: Callable[[LlamaCppStage], None]) -> None:
        for stage in self.stages:
            act(stage)

    def insert(self, sequence: int) -> None:
        self.each(lambda stage: stage.insert(sequence, 3000))

    def copy(self, source: int, sequence: int, upto: int) -> None:
        self.each(lambda stage: stage.copy(source, sequence, upto, 3000))

    def move(self, source: int, sequence: int, upto: int) -> None:
        self.each(lambda stage: stage.move(source, sequence, upto, 3000))

    def remove(self, sequence: int) -> None:
        self.each(lambda stage: stage.remove(sequence))

    def compute(self, *rows: tuple[int, int, Tokens]) -> np.ndarray:
        """The logits of the last position of each row (sequence, pos0, tokens)."""
        ids = np.array([token for _, _, tokens in rows for token in tokens])
        return forward(self.stages, [Row(sequence, pos0, len(tokens), 1) for sequence, pos0, tokens in rows], ids)

    def begin(self, length: int = len(PROMPT), sequence: int = 1) -> None:
        self.insert(sequence)
        self.compute((sequence, 0, PROMPT[:length]))

    @property
    def memory_bytes(self) -> int:
        return sum(stage.memory_bytes() for stage in self.stages)

    def close(self) -> None:
        self.each(lambda stage: stage.close())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), TinyModel(layers=LAYERS, context=4096))


@pytest.fixture(scope="module")
def lonely(model_dir: Path) -> Iterator[Ring]:
    """Computes what a sequence alone gets."""
    made = Ring(model_dir, share="off")
    yield made
    made.close()


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> Iterator[Ring]:
    made = Ring(model_dir)
    yield made
    made.close()


@pytest.fixture
def ring(loaded: Ring) -> Iterator[Ring]:
    before = loaded.memory_bytes
    yield loaded
    for sequence in loaded.stages[0].sequences():
        loaded.remove(sequence)
    assert loaded.memory_bytes == before


def check_alone(lonely: Ring, context: Tokens, tokens: Tokens, got: np.ndarray, why: str = "") -> None:
    lonely.insert(9999)
    lonely.compute((9999, 0, context))
    wanted = lonely.compute((9999, len(context), tokens))[0]
    lonely.remove(9999)
    np.testing.assert_allclose(got, wanted, atol=TOLERANCE, err_msg=why)


def pools_of(ring: Ring) -> Pools:
    return ring.stages[0]._loaded().pools


def groups_in(ring: Ring) -> set[groups.CellGroup]:
    places = [held.place[0] for held in pools_of(ring).held.values() if held.place]
    return {pool for pool in places if isinstance(pool, groups.CellGroup)}


def test_thirty_two_streams_over_one_prompt_hold_it_once(ring: Ring) -> None:
    before = ring.memory_bytes
    ring.begin()
    one_copy = ring.memory_bytes - before
    for sequence in range(2, 34):
        ring.copy(1, sequence, len(PROMPT))
    ring.remove(1)
    assert ring.memory_bytes - before <= 1.1 * one_copy
    ring.compute(*((sequence, len(PROMPT), (5,)) for sequence in range(2, 34)))
    own = groups.AHEAD * one_copy / len(PROMPT)
    assert ring.memory_bytes - before <= (groups.GROWTH + 0.3) * one_copy + 32 * own, "and room of its own for each"


def test_the_stage_says_that_it_shares(ring: Ring, lonely: Ring) -> None:
    assert ring.stages[0].capabilities.shares_from == LEAST_SHARED
    assert lonely.stages[0].capabilities.shares_from == 0


def test_rows_with_and_without_shared_cells_decode_together_as_alone(ring: Ring, lonely: Ring) -> None:
    ring.begin()
    ring.copy(1, 2, 1000)
    ring.copy(1, 3, 400)
    ring.copy(1, 4, 100)
    ring.begin(700, 5)
    ring.begin(3, 6)
    ring.compute((4, 100, PROMPT[100:130]))
    held = {1: 1000, 2: 1000, 3: 400, 4: 130, 5: 700, 6: 3}
    context = {sequence: PROMPT[:length] for sequence, length in held.items()}
    for tokens in ((5,), (6, 7), (8,), (9, 10, 11)):
        order = sorted(held, key=lambda sequence: (sequence * tokens[0]) % 7)
        got = ring.compute(*((sequence, len(context[sequence]), tokens) for sequence in order))
        for place, sequence in enumerate(order):
            check_alone(lonely, context[sequence], tokens, got[place], f"{sequence} {tokens}")
            context[sequence] += tokens


def test_a_sequence_cut_back_into_its_shared_part_leaves_the_others_as_they_are(ring: Ring, lonely: Ring) -> None:
    ring.begin()
    for sequence in (2, 3):
        ring.copy(1, sequence, 1000)
    ring.compute((1, 1000, (5,)), (2, 1000, (5,)), (3, 1000, (6,)))
    got = ring.compute((1, 300, (9, 8)), (2, 1001, (9, 8)), (3, 999, (9, 8)))
    for place, context in enumerate((PROMPT[:300], (*PROMPT, 5), PROMPT[:999])):
        check_alone(lonely, context, (9, 8), got[place])


def test_a_saved_sequence_has_its_shared_positions(ring: Ring, lonely: Ring) -> None:
    ring.begin(600)
    ring.copy(1, 2, 600)
    ring.compute((2, 600, (5,)))
    ring.each(lambda stage: stage.restore(3, 3000, stage.save(2)))
    check_alone(lonely, (*PROMPT[:600], 5), (6,), ring.compute((3, 601, (6,)))[0])


def test_a_sequence_moves_to_another_number_without_more_memory(ring: Ring, lonely: Ring) -> None:
    ring.begin(600)
    before = ring.memory_bytes
    ring.move(1, 2, 500)
    assert ring.memory_bytes == before and list(ring.stages[0].sequences()) == [2]
    check_alone(lonely, PROMPT[:500], (6,), ring.compute((2, 500, (6,)))[0])


def test_a_group_is_divided_when_its_sequences_have_grown(ring: Ring, lonely: Ring) -> None:
    """Attention to the cells of others costs time, so their number has a limit."""
    ring.begin(300)
    for sequence in range(2, 6):
        ring.copy(1, sequence, 300)
    assert len(groups_in(ring)) == 1
    context = dict.fromkeys(range(1, 6), PROMPT[:300])
    for turn in range(6):
        tokens = tuple(3 + (place * turn) % 40 for place in range(100))
        got = ring.compute(*((sequence, len(context[sequence]), tokens) for sequence in context))
        for place, sequence in enumerate(context):
            if turn > 3:
                check_alone(lonely, context[sequence], tokens, got[place])
            context[sequence] += tokens
        sharing = pools_of(ring).sharing
        assert sharing is not None
        for group in groups_in(ring):
            assert len(group.taken) < 2 or group.foreign() <= sharing.most_foreign + groups.room_for(0, 5)
    assert all(len(group.taken) < 5 for group in groups_in(ring))


def test_copies_that_a_group_does_not_take_form_another_one(ring: Ring, lonely: Ring) -> None:
    ring.begin(300)
    for sequence in range(2, 12):
        ring.copy(1, sequence, 300)
        ring.compute((sequence, 300, PROMPT[:20]))
    found = groups_in(ring)
    assert 2 <= len(found) <= 5 and sum(len(group.taken) for group in found) == 11
    got = ring.compute(*((sequence, 320, (9,)) for sequence in range(2, 12)), (1, 300, (9,)))
    for place in (0, 5, 9):
        check_alone(lonely, PROMPT[:300] + PROMPT[:20], (9,), got[place])
    check_alone(lonely, PROMPT[:300], (9,), got[10])


def test_a_copy_of_a_sequence_with_a_long_rest_leaves_it_where_it_is(ring: Ring, lonely: Ring) -> None:
    ring.begin()
    ring.copy(1, 2, 300)
    assert pools_of(ring).held[1].place not in [(group, 0) for group in groups_in(ring)]
    (group,) = groups_in(ring)
    assert group.cells == 512
    check_alone(lonely, PROMPT[:300], (9,), ring.compute((2, 300, (9,)))[0])
    check_alone(lonely, PROMPT, (9,), ring.compute((1, 1000, (9,)))[0])


def test_a_copy_without_memory_changes_nothing(ring: Ring, lonely: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> groups.CellGroup:
        raise EngineError("not enough memory")

    ring.begin(600)
    with monkeypatch.context() as patch:
        patch.setattr("exo_mesh_llamacpp.pools.new_group", refuse)
        with pytest.raises(EngineError, match="not enough memory"):
            ring.copy(1, 2, 600)
    assert list(ring.stages[0].sequences()) == [1]
    ring.copy(1, 2, 600)
    with monkeypatch.context() as patch:
        patch.setattr("exo_mesh_llamacpp.shared.groups.new_group", refuse)
        rows = [Row(2, 600, 300, 1)]
        output = ring.stages[0].forward(StageInput(tuple(rows), PROMPT[:300], {}))
    assert [fault.sequence for fault in output.faults] == [2] and "not enough memory" in output.faults[0].message
    check_alone(lonely, PROMPT[:600], (9,), ring.compute((1, 600, (9,)))[0])


@pytest.mark.parametrize(
    "options", [{"kv": "f16"}, {"kv": "f16", "flash": "on"}, {"kv": "q8_0", "flash": "on"}, {"unified": "on"}], ids=str
)
def test_every_kind_of_cache_is_shared(tmp_path: Path, options: dict[str, str]) -> None:
    model_dir = write_checkpoint(tmp_path, TinyModel(layers=LAYERS, heads=2, context=4096))
    got = []
    for share in ("on", "off"):
        made = Ring(model_dir, share=share, **options)
        made.begin(600)
        for sequence in (2, 3, 4):
            made.copy(1, sequence, 600 - sequence)
        lengths = {sequence: 600 - sequence for sequence in (2, 3, 4)}
        for turn in range(150):
            logits = made.compute(*((one, lengths[one] + turn, (3 + (one * turn) % 50,)) for one in lengths))
        assert bool(groups_in(made)) == (share == "on")
        made.close()
        got.append(logits)
    assert np.abs(got[0] - got[1]).max() <= SLACK


def run_schedule(rings: tuple[Ring, ...], lonely: Ring, seed: int, steps: int) -> None:
    """Random copies, moves, rows, cuts and ends: all rings compute the same bits, and nearly those of each sequence
    alone."""
    rng = random.Random(seed)
    held: dict[int, Tokens] = {}

    def draw(count: int) -> Tokens:
        return tuple(rng.randrange(3, 60) for _ in range(count))

    def compute(*rows: tuple[int, int, Tokens]) -> np.ndarray:
        first, *others = [ring.compute(*rows) for ring in rings]
        for other in others:
            np.testing.assert_array_equal(other, first, err_msg=f"seed {seed}")
        return first

    for new in range(1, steps):
        kind = rng.random()
        if not held or kind < 0.12:
            held[new] = draw(rng.choice([5, 30, 90]))
            for ring in rings:
                ring.insert(new)
            compute((new, 0, held[new]))
        elif kind < 0.5:
            source = rng.choice(list(held))
            upto = rng.randint(1, len(held[source]))
            held[new] = held[source][:upto]
            for ring in rings:
                (ring.copy if kind < 0.44 else ring.move)(source, new, upto)
            if kind >= 0.44:
                del held[source]
        elif kind < 0.6 and len(held) > 2:
            gone = rng.choice(list(held))
            del held[gone]
            for ring in rings:
                ring.remove(gone)
        else:
            n = rng.choice([1, 1, 1, 3, 20, 60])
            rows: list[tuple[int, int, Tokens]] = []
            for sequence in rng.sample(list(held), rng.randint(1, len(held))):
                back = rng.randrange(min(12, len(held[sequence]))) if rng.random() < 0.2 else 0
                rows.append((sequence, len(held[sequence]) - back, draw(n)))
            got = compute(*rows)
            for place, (sequence, pos0, tokens) in enumerate(rows):
                held[sequence] = held[sequence][:pos0] + tokens
                check_alone(lonely, held[sequence][:pos0], tokens, got[place], f"seed {seed}, step {new}")
    for ring in rings:
        for sequence in held:
            ring.remove(sequence)
        assert all(stage.memory_bytes() for stage in ring.stages) and not groups_in(ring)


@pytest.fixture(scope="module")
def rings(model_dir: Path) -> Iterator[tuple[Ring, ...]]:
    """The same model whole and in two parts, with small groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "FOREIGN_PER_WIDTH", 2)
        patch.setattr(loading, "LEAST_SHARED", 8)
        patch.setattr(groups, "AHEAD", 1)
        made = (Ring(model_dir), Ring(model_dir, 2))
        yield made
        for ring in made:
            ring.close()


@pytest.mark.parametrize("seed", range(2))
def test_random_copies_and_cuts_compute_what_each_sequence_computes_alone(
    rings: tuple[Ring, ...], lonely: Ring, seed: int
) -> None:
    run_schedule(rings, lonely, seed, 40)


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_random_copies_and_cuts(rings: tuple[Ring, ...], lonely: Ring, seed: int) -> None:
    run_schedule(rings, lonely, seed + int(os.environ.get("EXO_MESH_TEST_SEED", "0")), 120)


@pytest.mark.parametrize("seed", range(20))
def test_runs_count_what_sets_of_positions_would_count(seed: int) -> None:
    """The model of each slot: a list of cells, which copies have in common."""
    rng, runs, cells, number = random.Random(seed), SharedRuns(), dict[int, list[int]](), 0
    for slot in range(60):
        source = rng.choice([*cells, slot])
        if source != slot:
            upto = rng.randint(1, len(cells[source]))
            runs.copy(source, slot, upto)
            cells[slot] = cells[source][:upto]
        changed, count = rng.choice([*cells, slot]), rng.randrange(1, 30)
        runs.extend(changed, count)
        cells.setdefault(changed, []).extend(range(number, number + count))
        number += count
        changed, length = rng.choice(list(cells)), rng.randrange(60) if rng.random() < 0.8 else 0
        runs.cut(changed, length)
        del cells[changed][length:]
        cells = {one: held for one, held in cells.items() if held}
        assert runs.used == len({cell for held in cells.values() for cell in held})
        for one, held in cells.items():
            others = {cell for other, them in cells.items() if other != one for cell in them}
            assert (runs.length(one), runs.own(one)) == (len(held), len(set(held) - others))
            for other, them in cells.items():
                assert runs.common(one, other) == len(set(held) & set(them))

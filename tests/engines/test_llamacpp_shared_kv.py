"""The llama.cpp engine's groups of cells that sequences share; test_shared_kv.py has what every engine must show."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from exo_mesh_llamacpp import provider
from exo_mesh_llamacpp.pools import Pools
from exo_mesh_llamacpp.shared import groups
from exo_mesh_llamacpp.shared.runs import SharedRuns

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import StageInput
from exo_mesh.errors import EngineError
from exo_mesh.weights.random_checkpoint import TinyModel, write_checkpoint
from tests.support.shared_streams import PROMPT, Loaded, Streams, loaded

SLACK = 0.005
"""Largest difference with keys and values of fewer bits: logits have a standard deviation of about 1."""
LAYERS = 4

pytestmark = pytest.mark.skipif(not provider.availability().available, reason="xllamacpp is not installed")


def open_ring(directory: Path, **options: str) -> Loaded:
    return loaded(provider, directory, LAYERS, **{"threads": "1", "kv": "f32", **options})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streams]:
    directory = write_checkpoint(tmp_path_factory.mktemp("model"), TinyModel(layers=LAYERS, context=4096))
    streams = Streams([open_ring(directory)], open_ring(directory, share="off"))
    yield streams
    for stage in (*streams.stages, *streams.lonely):
        stage.close()


@pytest.fixture
def ring(made: Streams) -> Iterator[Streams]:
    before = made.memory_bytes
    yield made
    made.clear()
    assert made.memory_bytes == before


def pools_of(ring: Streams) -> Pools:
    return ring.stages[0]._loaded().pools


def groups_in(ring: Streams) -> set[groups.CellGroup]:
    places = [held.place[0] for held in pools_of(ring).held.values() if held.place]
    return {pool for pool in places if isinstance(pool, groups.CellGroup)}


def test_a_group_is_divided_when_its_sequences_have_grown(ring: Streams) -> None:
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
                ring.check_alone(got[place], context[sequence], tokens)
            context[sequence] += tokens
        sharing = pools_of(ring).sharing
        assert sharing is not None
        for group in groups_in(ring):
            assert len(group.taken) < 2 or group.foreign() <= sharing.most_foreign + groups.room_for(0, 5)
    assert all(len(group.taken) < 5 for group in groups_in(ring))


def test_copies_that_a_group_does_not_take_form_another_one(ring: Streams) -> None:
    ring.begin(300)
    for sequence in range(2, 12):
        ring.copy(1, sequence, 300)
        ring.compute((sequence, 300, PROMPT[:20]))
    found = groups_in(ring)
    assert 2 <= len(found) <= 5 and sum(len(group.taken) for group in found) == 11
    got = ring.compute(*((sequence, 320, (9,)) for sequence in range(2, 12)), (1, 300, (9,)))
    for place in (0, 5, 9):
        ring.check_alone(got[place], PROMPT[:300] + PROMPT[:20], (9,))
    ring.check_alone(got[10], PROMPT[:300], (9,))


def test_a_copy_of_a_sequence_with_a_long_rest_leaves_it_where_it_is(ring: Streams) -> None:
    ring.begin()
    ring.copy(1, 2, 300)
    assert pools_of(ring).held[1].place not in [(group, 0) for group in groups_in(ring)]
    (group,) = groups_in(ring)
    assert group.cells == 512
    ring.check_alone(ring.compute((2, 300, (9,)))[0], PROMPT[:300], (9,))
    ring.check_alone(ring.compute((1, 1000, (9,)))[0], PROMPT, (9,))


def test_a_copy_without_memory_changes_nothing(ring: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
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
    ring.check_alone(ring.compute((1, 600, (9,)))[0], PROMPT[:600], (9,))


@pytest.mark.parametrize(
    "options", [{"kv": "f16"}, {"kv": "f16", "flash": "on"}, {"kv": "q8_0", "flash": "on"}, {"unified": "on"}], ids=str
)
def test_every_kind_of_cache_is_shared(tmp_path: Path, options: dict[str, str]) -> None:
    model_dir = write_checkpoint(tmp_path, TinyModel(layers=LAYERS, heads=2, context=4096))
    got = []
    for share in ("on", "off"):
        made = Streams([open_ring(model_dir, share=share, **options)])
        made.begin(600)
        for sequence in (2, 3, 4):
            made.copy(1, sequence, 600 - sequence)
        lengths = {sequence: 600 - sequence for sequence in (2, 3, 4)}
        for turn in range(150):
            logits = made.compute(*((one, lengths[one] + turn, (3 + (one * turn) % 50,)) for one in lengths))
        assert bool(groups_in(made)) == (share == "on")
        made.stages[0].close()
        got.append(logits)
    assert np.abs(got[0] - got[1]).max() <= SLACK


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

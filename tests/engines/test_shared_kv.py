"""Sequences that begin alike hold the beginning once, on every engine, and compute what each computes alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import exo_mesh_llamacpp
import exo_mesh_mlx
import exo_mesh_numpy
import exo_mesh_torch
import pytest

from exo_mesh.engine.contract import LEAST_SHARED
from tests.engines.serving_ways import flat_model
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.exactness import EPSILON, rms
from tests.support.shared_streams import PROMPT, Streams, decode_together, loaded, run_schedule

LLAMACPP = {"threads": "1", "kv": "f32"}


def numpy_streams(directory: Path, mode: str) -> Streams:
    from exo_mesh_numpy.kv import STEP

    ring = loaded(exo_mesh_numpy.provider, flat_model(directory), 4, mode=mode)
    return Streams([ring], tolerance=lambda _: 0.0 if mode == "deterministic" else 1e-3, room=STEP)


def torch_streams(directory: Path) -> Streams:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tools.architectures.torch_families import NUM_LAYERS
    from tools.architectures.torch_models import write_random_model

    ring = loaded(exo_mesh_torch.provider, write_random_model(directory, "llama"), NUM_LAYERS, threads="1")
    return Streams([ring], room=65)


def mlx_streams(directory: Path) -> Streams:
    pytest.importorskip("mlx_lm")
    from exo_mesh_mlx.shared.parts import FIRST_STEP

    from tools.architectures.mlx_configs import tiny_config
    from tools.architectures.mlx_models import write_checkpoint as write_mlx
    from tools.architectures.sizes import LAYERS

    ring = loaded(exo_mesh_mlx.provider, write_mlx(directory, tiny_config("qwen3")), LAYERS)
    return Streams([ring], tolerance=lambda wanted: EPSILON["float32"] * rms(wanted), room=FIRST_STEP)


def llamacpp_streams(directory: Path, *cuts: int) -> Streams:
    if not exo_mesh_llamacpp.provider.availability().available:
        pytest.skip("xllamacpp is not installed")
    from exo_mesh_llamacpp.shared.groups import AHEAD, GROWTH

    write_checkpoint(directory, TinyModel(layers=4, context=4096))
    rings = [loaded(exo_mesh_llamacpp.provider, directory, 4, *cut, **LLAMACPP) for cut in [(), *((c,) for c in cuts)]]
    lonely = loaded(exo_mesh_llamacpp.provider, directory, 4, share="off", **LLAMACPP)
    return Streams(rings, lonely, room=AHEAD, growth=GROWTH + 0.3)


ENGINES: dict[str, Callable[[Path], Streams]] = {
    "numpy": lambda directory: numpy_streams(directory, "deterministic"),
    "numpy fast": lambda directory: numpy_streams(directory, "fast"),
    "torch": torch_streams,
    "mlx": mlx_streams,
    "llamacpp": llamacpp_streams,
}


@pytest.fixture(scope="module", params=ENGINES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streams]:
    streams = ENGINES[request.param](tmp_path_factory.mktemp("model"))
    yield streams
    for stage in streams.stages:
        stage.close()


def quick_for(*engines: str) -> pytest.MarkDecorator:
    """The test of other engines is an extended one."""
    all_of_them = [pytest.param(one, marks=() if one in engines else pytest.mark.extended) for one in ENGINES]
    return pytest.mark.parametrize("made", all_of_them, indirect=True)


@pytest.fixture
def streams(made: Streams) -> Iterator[Streams]:
    before = made.memory_bytes
    yield made
    made.clear()
    assert made.memory_bytes == before


def test_thirty_two_streams_over_one_prompt_hold_it_once(streams: Streams) -> None:
    before = streams.memory_bytes
    streams.begin()
    one_copy = streams.memory_bytes - before
    for sequence in range(2, 34):
        streams.copy(1, sequence, len(PROMPT))
    streams.remove(1)
    assert streams.memory_bytes - before <= 1.1 * one_copy
    got = streams.compute(*((sequence, len(PROMPT), (5,)) for sequence in range(2, 34)))
    streams.check_alone(got[31], PROMPT, (5,))
    own = streams.room * one_copy / len(PROMPT)
    assert streams.memory_bytes - before <= streams.growth * one_copy + 32 * own, "and room of its own for each"


def test_the_stage_says_that_it_shares(streams: Streams) -> None:
    assert {stage.capabilities.shares_from for stage in streams.stages} == {LEAST_SHARED}
    if streams.lonely is not streams.rings[0]:
        assert streams.lonely[0].capabilities.shares_from == 0


@quick_for("numpy fast", "torch", "llamacpp")
def test_rows_with_and_without_shared_parts_decode_together_as_alone(streams: Streams) -> None:
    streams.begin()
    for sequence, upto in ((2, 1000), (3, 400), (4, 100)):
        streams.copy(1, sequence, upto)
    streams.begin(700, 5)
    streams.begin(3, 6)
    streams.compute((4, 100, PROMPT[100:130]))
    held = {1: 1000, 2: 1000, 3: 400, 4: 130, 5: 700, 6: 3}
    decode_together(streams, {sequence: PROMPT[:length] for sequence, length in held.items()})


@quick_for("torch", "llamacpp")
def test_a_sequence_cut_back_into_its_shared_part_leaves_the_others_as_they_are(streams: Streams) -> None:
    streams.begin()
    for sequence in (2, 3):
        streams.copy(1, sequence, 1000)
    streams.compute((1, 1000, (5,)), (2, 1000, (5,)), (3, 1000, (6,)))
    got = streams.compute((1, 300, (9, 8)), (2, 1001, (9, 8)), (3, 999, (9, 8)))
    for place, context in enumerate((PROMPT[:300], (*PROMPT, 5), PROMPT[:999])):
        streams.check_alone(got[place], context, (9, 8))


@quick_for("numpy")
def test_shared_positions_outlive_the_sequence_that_computed_them(streams: Streams) -> None:
    """It goes on, is cut back and ends; copies were made before and after."""
    streams.begin(700)
    streams.copy(1, 2, 700)
    streams.copy(1, 3, 400)
    streams.compute((1, 700, PROMPT[700:]))
    streams.copy(1, 4, 1000)
    streams.compute((1, 300, (9, 9, 9)))
    streams.remove(1)
    for sequence, length in ((2, 700), (3, 400), (4, 1000), (2, 100)):
        streams.check_alone(streams.compute((sequence, length, (5, 6)))[0], PROMPT[:length], (5, 6))


@quick_for("torch", "mlx")
@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.extended), 50])
def test_a_lone_row_follows_its_shared_part(streams: Streams, n: int) -> None:
    streams.begin(600)
    streams.copy(1, 2, 600)
    for _ in range(2):
        streams.check_alone(streams.compute((2, 600, PROMPT[:n]))[0], PROMPT[:600], PROMPT[:n])


@quick_for("torch", "mlx", "llamacpp")
def test_a_saved_sequence_has_its_shared_positions(streams: Streams) -> None:
    streams.begin(600)
    streams.copy(1, 2, 600)
    for stage in streams.stages:
        stage.restore(3, 3000, stage.save(2))
    streams.compute((2, 600, (5,)))
    for stage in streams.stages:
        stage.restore(4, 3000, stage.save(2))
    streams.check_alone(streams.compute((3, 600, (6,)))[0], PROMPT[:600], (6,))
    streams.check_alone(streams.compute((4, 601, (6,)))[0], (*PROMPT[:600], 5), (6,))


@quick_for("llamacpp")
def test_a_sequence_moves_to_another_number_without_more_memory(streams: Streams) -> None:
    streams.begin(600)
    before = streams.memory_bytes
    streams.move(1, 2, 500)
    assert streams.memory_bytes <= before and list(streams.stages[0].sequences()) == [2]
    streams.check_alone(streams.compute((2, 500, (6,)))[0], PROMPT[:500], (6,))


@pytest.fixture(scope="module", params=[pytest.param("numpy", marks=pytest.mark.extended), "torch", "mlx", "llamacpp"])
def small_parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streams]:
    """Streams that share from 8 positions on; of llama.cpp whole and in two parts, with small groups."""
    directory = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr("exo_mesh_numpy.kv.LEAST_SHARED", 8)
        elif request.param == "mlx":
            patch.setattr("exo_mesh_mlx.shared.parts.LEAST_SHARED", 8)
            patch.setattr("exo_mesh_mlx.shared.alone.PATIENCE", 2)
        elif request.param == "llamacpp":
            patch.setattr("exo_mesh_llamacpp.loading.FOREIGN_PER_WIDTH", 2)
            patch.setattr("exo_mesh_llamacpp.loading.LEAST_SHARED", 8)
            patch.setattr("exo_mesh_llamacpp.shared.groups.AHEAD", 1)
        streams = llamacpp_streams(directory, 2) if request.param == "llamacpp" else ENGINES[request.param](directory)
        if request.param == "torch":
            streams.stages[0]._batches.least_shared = 8
        yield streams
        for stage in streams.stages:
            stage.close()


@pytest.fixture
def small(small_parts: Streams) -> Iterator[Streams]:
    before = small_parts.memory_bytes
    yield small_parts
    small_parts.clear()
    assert small_parts.memory_bytes == before


@pytest.mark.parametrize("seed", range(2))
def test_random_copies_and_cuts_compute_what_each_sequence_computes_alone(small: Streams, seed: int) -> None:
    run_schedule(small, seed, 30)


@pytest.mark.extended
@pytest.mark.parametrize("seed", [100, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(101, 110))])
def test_many_random_copies_and_cuts(small: Streams, seed: int) -> None:
    run_schedule(small, seed + int(os.environ.get("EXO_MESH_TEST_SEED", "0")), 80)

"""Runners of every engine, all started again, read a prompt from their disks and answer as they do without any."""

from __future__ import annotations

import asyncio
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from exo_mesh.cli.bench.local_ring import LocalRunner, local_ring
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.registry import providers
from exo_mesh.models.fetcher.writing import new_manifest
from exo_mesh.rings.prefix_disk.folder import stored_files
from exo_mesh.settings.values import MOST_CACHE_BYTES
from exo_mesh.weights.fetched import write_manifest
from exo_mesh.wire.control_driver import DriverChannels
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.group_rings import generate

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

LAYERS, CONTEXT = 4, 1024
FILE = "model.safetensors"
PROMPT = np.random.default_rng(3).integers(3, 256, 600).tolist()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), TinyModel(layers=LAYERS, context=CONTEXT))


def plan_of(engines: tuple[str, ...]) -> Plan:
    """The layers are shared out evenly."""
    cuts = [LAYERS * index // len(engines) for index in range(len(engines) + 1)]
    stages = tuple(
        StagePlan(f"p{index}", engine, Shard("tiny", start, stop, LAYERS), 0)
        for index, (engine, (start, stop)) in enumerate(zip(engines, pairwise(cuts), strict=True))
    )
    return Plan("restarted", Ballot(1, "test"), "tiny", "d", stages, CONTEXT, PlanInputs((), "memory", 1), 4 * CONTEXT)


async def answer(
    model_dir: Path, engines: tuple[str, ...], disks: Path, *, writes: bool = False, is_on: bool = True
) -> tuple[list[int], int, int]:
    """What a new ring answers, and how many hits and misses of its disks that took. writes: each stage has its file
    then."""
    plan, channels = plan_of(engines), DriverChannels()
    try:
        async with local_ring(plan, model_dir, {}, prefix_bytes=MOST_CACHE_BYTES, disks=disks) as runners:
            tokens = await generate(channels, runners, plan, PROMPT, 16)
            assert (await runners[-1].fresh_beat()).prefix.disk_is_on is is_on
            if writes:
                await have_written(runners)
            figures = (await runners[-1].fresh_beat()).prefix
            return tokens, figures.disk_hits, figures.disk_misses
    finally:
        await channels.close()


async def have_written(runners: list[LocalRunner]) -> None:
    """Returns once each stage has a file."""
    async with asyncio.timeout(60):
        for runner in runners:
            while not (await runner.fresh_beat()).prefix.disk_files:
                pass


@pytest.mark.parametrize("is_damaged", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "damaged"])
@pytest.mark.parametrize(
    "engines",
    [
        ("numpy", "numpy"),
        pytest.param(("mlx", "mlx"), marks=pytest.mark.slow),
        pytest.param(("torch", "torch"), marks=pytest.mark.slow),
        pytest.param(("llamacpp", "llamacpp"), marks=pytest.mark.slow),
        ("llamacpp", "mlx"),
        pytest.param(("mlx", "torch", "numpy"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
async def test_after_a_restart_of_all_stages_the_prompt_is_read_and_the_answer_is_that_of_a_cold_run(
    llama: Path, tmp_path: Path, engines: tuple[str, ...], is_damaged: bool
) -> None:
    for engine in engines:
        found = providers().get(engine)
        if found is None or not found.availability().available:
            pytest.skip(f"engine {engine} cannot run here")
    cold, hits, misses = await answer(llama, engines, tmp_path, writes=True)
    assert (hits, misses) == (0, 0)
    if is_damaged:
        (file,) = (one.path for one in stored_files(tmp_path) if one.stage.startswith("0/"))
        data = bytearray(file.read_bytes())
        data[-100] ^= 0xFF
        file.write_bytes(data)
    assert await answer(llama, engines, tmp_path) == (cold, 1, int(is_damaged)), "a miss counts as a hit first"


async def test_a_ring_writes_no_kv_while_its_weights_are_unchecked(llama: Path, tmp_path: Path) -> None:
    """The manifest is that of a node that has fetched only some bytes of a file, of which it knows the digest."""
    model_dir, engines, disks = tmp_path / "m", ("numpy", "numpy"), tmp_path / "disks"
    shutil.copytree(llama, model_dir)
    size = (model_dir / FILE).stat().st_size
    manifest = new_manifest("tiny", "", "", {FILE: (size, 64 * "0")})
    manifest.files[FILE].present = [(0, size - 1)]
    write_manifest(model_dir, manifest)
    cold, *_ = await answer(model_dir, engines, disks, is_on=False)
    assert not list(stored_files(disks))
    manifest.files[FILE].verified = [(0, size - 1)]
    write_manifest(model_dir, manifest)
    assert await answer(model_dir, engines, disks, writes=True) == (cold, 0, 0)
    assert await answer(model_dir, engines, disks) == (cold, 1, 0)

"""In mode=deterministic a row has the same bits in any company: split, batch, chunk, rollback and replay."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from exo_mesh_numpy import kernels, provider
from exo_mesh_numpy.kernels import TILE, TiledKernels, check_tiles
from exo_mesh_numpy.scratch import Scratch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exo_mesh.domain.frame import Row
from exo_mesh.errors import EngineError
from exo_mesh.weights.store import SHIPPED
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.ring import Ring

NUM_LAYERS = 4
NUM_SEQUENCES = 3
LENGTH = 84
"""More than a pass of 64 tokens and than two blocks of 32 keys."""

MODELS = {
    "llama": TinyModel("llama", layers=NUM_LAYERS),
    # no size is a multiple of a tile, and only one head of keys
    "odd sizes": TinyModel(
        "qwen2", layers=NUM_LAYERS, hidden=72, heads=3, kv_heads=1, intermediate=101, vocab=301, seed=1
    ),
    # deeper than one product of a tile takes
    "wide, tied": TinyModel("qwen3", layers=NUM_LAYERS, hidden=64, intermediate=1100, tied=True, seed=2),
}
IDS = np.random.default_rng(4).integers(0, 300, (NUM_SEQUENCES, LENGTH)).astype(np.int32)
SLOTS = st.integers(0, NUM_SEQUENCES - 1)


class Model:
    """A checkpoint, its rings by cuts, and its logits by the plainest way to compute them."""

    def __init__(self, directory: Path, num_layers: int) -> None:
        scale = num_layers // NUM_LAYERS
        self.ring: Callable[[tuple[int, ...]], Ring] = cache(
            lambda cuts: Ring(provider, directory, num_layers, [scale * cut for cut in cuts], mode="deterministic")
        )
        """By cuts between quarters of the layers."""
        whole = self.ring(())
        whole.insert(0)
        ids = [[whole.forward([Row(0, i, 1, 1)], line[i : i + 1])[0] for i in range(LENGTH)] for line in IDS]
        self.expected = np.array(ids)
        """One stage, one sequence, one token at a time: `[sequence, position, vocab]`."""
        whole.remove(0)


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        pytest.param("odd sizes", marks=pytest.mark.extended),
        pytest.param("wide, tied", marks=pytest.mark.extended),
        SHIPPED,
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    if request.param == SHIPPED:
        return Model(Path(str(resources.files("exo_mesh.weights") / "shipped" / SHIPPED)), 8)
    return Model(write_checkpoint(tmp_path_factory.mktemp("rows"), MODELS[request.param]), NUM_LAYERS)


@st.composite
def frames(draw: st.DrawFn) -> list[list[tuple[int, int, int, bool]]]:
    """Frames of rows (sequence, pos0, n, are its tokens the right ones?): ragged prefill chunks, decode steps, drafts
    that are thrown away, and sequences that begin anew."""
    lengths = [0] * NUM_SEQUENCES
    made = []
    for _ in range(draw(st.integers(4, 10))):
        frame = []
        for sequence in draw(st.lists(SLOTS, min_size=1, max_size=NUM_SEQUENCES, unique=True)):
            kind = draw(st.sampled_from(["chunk", "chunk", "decode", "draft", "back", "anew"]))
            here = lengths[sequence]
            pos0 = {"anew": 0, "back": draw(st.integers(0, here))}.get(kind, here)
            most = 1 if kind == "decode" else 5 if kind == "draft" else 40
            n = draw(st.integers(1, most))
            if pos0 + n > LENGTH:
                pos0, n = min(pos0, LENGTH - 1), 1
            frame.append((sequence, pos0, n, kind != "draft"))
            # what a draft wrote is wrong, so the next row begins where the draft did
            lengths[sequence] = pos0 if kind == "draft" else pos0 + n
        made.append(frame)
    return made


CUTS = st.sets(st.integers(1, NUM_LAYERS - 1)).map(lambda cuts: tuple(sorted(cuts)))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(cuts=CUTS, schedule=frames())
def test_logits_have_the_bits_of_one_row_at_a_time(
    model: Model, cuts: tuple[int, ...], schedule: list[list[tuple[int, int, int, bool]]]
) -> None:
    check(model, cuts, schedule)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=CUTS, schedule=frames())
def test_logits_have_the_bits_of_one_row_at_a_time_for_many_schedules(
    model: Model, cuts: tuple[int, ...], schedule: list[list[tuple[int, int, int, bool]]]
) -> None:
    check(model, cuts, schedule)


def check(model: Model, cuts: tuple[int, ...], schedule: list[list[tuple[int, int, int, bool]]]) -> None:
    ring = model.ring(cuts)
    ring.insert(*range(NUM_SEQUENCES))
    for frame in schedule:
        rows = [Row(sequence, pos0, n, n) for sequence, pos0, n, _ in frame]
        tokens = [IDS[s, pos0 : pos0 + n] if right else IDS[s, pos0 : pos0 + n] ^ 1 for s, pos0, n, right in frame]
        got = ring.forward(rows, np.concatenate(tokens))
        expected = [model.expected[s, pos0 : pos0 + n] for s, pos0, n, _ in frame]
        right = np.repeat([item[3] for item in frame], [item[2] for item in frame])
        np.testing.assert_array_equal(got[right], np.concatenate(expected)[right])
    ring.remove(*range(NUM_SEQUENCES))


def test_every_split_has_the_same_bits(model: Model) -> None:
    for cuts in [(1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, 2, 3)]:
        ring = model.ring(cuts)
        ring.insert(1)
        np.testing.assert_array_equal(ring.forward([Row(1, 0, LENGTH, LENGTH)], IDS[0]), model.expected[0])
        ring.remove(1)


def test_a_stage_says_what_it_promises(model: Model, tmp_path: Path) -> None:
    assert all(stage.capabilities.row_exact for stage in model.ring((2,)).stages)
    fast = Ring(provider, write_checkpoint(tmp_path, MODELS["llama"]), NUM_LAYERS, ())
    assert not fast.stages[0].capabilities.row_exact


@pytest.mark.parametrize("num_outputs", [1, 2, 15, 16, 17, 33, 64, 301])
@pytest.mark.parametrize("num_inputs", [1, 8, 512, 513, 1100])
def test_a_product_of_a_row_depends_on_that_row_alone(num_outputs: int, num_inputs: int) -> None:
    rng = np.random.default_rng(num_outputs * num_inputs)
    weight = rng.standard_normal((num_outputs, num_inputs), dtype=np.float32)
    rows = rng.standard_normal((48, num_inputs), dtype=np.float32)
    tiled = TiledKernels(Scratch())

    def product(rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), num_outputs), np.float32)
        tiled.product(np.ascontiguousarray(rows), weight, out)
        return out

    together = product(rows)
    np.testing.assert_allclose(together, rows.astype(np.float64) @ weight.T.astype(np.float64), atol=2e-3)
    order = rng.permutation(48)
    np.testing.assert_array_equal(product(rows[order]), together[order])
    for index in (0, 7, 47):
        alone = np.zeros((TILE, num_inputs), np.float32)
        alone[index % 5] = rows[index]
        np.testing.assert_array_equal(product(alone)[index % 5], together[index])


def test_a_blas_that_breaks_the_promise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tiles({64, 1100}, 16, 32)
    matmul = np.matmul

    class Careless:
        """NumPy with a BLAS that computes the last column of a tile by another loop."""

        def __getattr__(self, name: str) -> object:
            return getattr(np, name)

        @staticmethod
        def matmul(left: np.ndarray, right: np.ndarray) -> np.ndarray:
            product: np.ndarray = matmul(left, right)
            product[:, -1] = np.nextafter(product[:, -1], np.float32(9))
            return product

    monkeypatch.setattr(kernels, "np", Careless())
    with pytest.raises(EngineError, match="mode=deterministic does not work on this machine"):
        check_tiles({64}, 16, 32)


DIGEST = """
import hashlib, sys
from pathlib import Path
import numpy as np
from exo_mesh_numpy import provider
from exo_mesh.domain.frame import Row
from tests.support.ring import Ring
ring = Ring(provider, Path(sys.argv[1]), 2, (1,), mode=sys.argv[2])
ring.insert(1)
ids = np.arange(70, dtype=np.int32)
digest = hashlib.sha256(ring.forward([Row(1, 0, 40, 40)], ids[:40]).tobytes())
for i in range(40, 44):
    digest.update(ring.forward([Row(1, i, 1, 1)], ids[i : i + 1]).tobytes())
print(digest.hexdigest())
"""


def test_the_bits_do_not_depend_on_the_number_of_blas_threads(tmp_path: Path) -> None:
    # matrices so large that BLAS would use its threads for a product of 16 rows
    model = dataclasses.replace(MODELS["llama"], layers=2, hidden=512, heads=8, kv_heads=4, intermediate=1408)
    write_checkpoint(tmp_path, model)
    root = Path(__file__).parents[2]

    def digest(num_threads: int) -> str:
        settings = {name: str(num_threads) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}
        command = [sys.executable, "-c", DIGEST, str(tmp_path), "deterministic"]
        path = os.pathsep.join([str(root), str(root / "engines")])
        environ = {**os.environ, **settings, "PYTHONPATH": path}
        done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    one, two = digest(1), digest(2)
    assert len(one) == len(hashlib.sha256().hexdigest())
    assert one == two

"""Packed weights give what plain ones give, for any cut; code that cannot have them gets plain ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from exo_mesh_torch.devices import DTYPES
from exo_mesh_torch.engine import TorchStage
from exo_mesh_torch.packing import MIN_ELEMENTS, wants_packing

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageInput
from exo_mesh.errors import InputError
from exo_mesh.weights.random_checkpoint import TinyModel, write_checkpoint

CPU = torch.device("cpu")
MODEL = TinyModel(layers=2, hidden=512, heads=8, kv_heads=4, intermediate=1024, vocab=600)
IDS = tuple((37 * i) % 600 for i in range(48))


def _can_pack() -> bool:
    try:
        return wants_packing({"packed": "on"}, CPU)
    except InputError:
        return False


pytestmark = pytest.mark.skipif(not _can_pack(), reason="torch cannot pack weights on this machine")


@pytest.fixture
def model_dir(tmp_path: Path) -> Iterator[Path]:
    threads = torch.get_num_threads()
    yield write_checkpoint(tmp_path / "model", MODEL)
    torch.set_num_threads(threads)


def logits(model_dir: Path, cuts: tuple[int, ...] = (), **options: str) -> tuple[np.ndarray, int]:
    """Of a prompt of 40 tokens and three steps of three sequences, through stages cut there; and the stages' bytes."""
    bounds = [0, *cuts, MODEL.layers]
    stages = []
    for start, stop in pairwise(bounds):
        stage = TorchStage()
        shard = Shard("m", start, stop, MODEL.layers)
        stage.load(LoadRequest(shard, model_dir, 512, {"threads": "1", **options}), lambda done, total: None)
        stages.append(stage)
    results = []
    for frame in frames():
        tensors, logits_of_frame = {}, None
        for stage in stages:
            for row in frame[0]:
                stage.insert(row.sequence, 100)
            output = stage.forward(StageInput(frame[0], frame[1], tensors))
            assert not output.faults
            tensors, logits_of_frame = dict(output.tensors), output.logits
        assert logits_of_frame is not None
        results.append(logits_of_frame)
    num_bytes = sum(stage.memory_bytes() for stage in stages)
    for stage in stages:
        stage.close()
    return np.concatenate(results), num_bytes


def frames() -> Iterator[tuple[tuple[Row, ...], tuple[int, ...]]]:
    for sequence in (1, 2, 3):
        yield (Row(sequence, 0, 40, 1),), IDS[:40]
    for step in range(3):
        yield tuple(Row(sequence, 40 + step, 1, 1) for sequence in (1, 2, 3)), IDS[40 + step : 43 + step]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_packed_weights_give_what_plain_ones_give(model_dir: Path, dtype: str, tolerance: float) -> None:
    """To rounding, in the same memory, and with the same bits wherever the model is cut."""
    assert dtype in DTYPES
    plain, plain_bytes = logits(model_dir, dtype=dtype, packed="off")
    packed, packed_bytes = logits(model_dir, dtype=dtype, packed="on")
    rms = float(np.sqrt(np.mean(np.square(plain))))
    assert np.abs(packed - plain).max() <= tolerance * rms
    assert packed_bytes == plain_bytes
    np.testing.assert_array_equal(logits(model_dir, (1,), dtype=dtype, packed="on")[0], packed)


def test_large_layers_are_packed_and_small_ones_are_not(model_dir: Path) -> None:
    stage = TorchStage()
    stage.load(
        LoadRequest(Shard("m", 0, 2, 2), model_dir, 512, {"threads": "1", "packed": "on"}), lambda done, total: None
    )
    model, _ = stage._loaded()
    linears = [m for m in model._stage._model.modules() if isinstance(m, torch.nn.Linear)]
    # the keys' and values' projections, of half as many heads, are small
    large = {True: [], False: []}
    for linear in linears:
        large[linear.in_features * linear.out_features >= MIN_ELEMENTS].append(linear.weight)
    assert all(weight is None for weight in large[True]) and len(large[True]) == 5 * MODEL.layers + 1
    assert all(weight is not None for weight in large[False]) and len(large[False]) == 2 * MODEL.layers
    stage.close()


def test_code_that_uses_the_weights_itself_gets_plain_ones(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain, plain_bytes = logits(model_dir, dtype="float32", packed="off")

    def forward(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.linear(x, self.gate_proj.weight)  # not by calling the layer
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))  # type: ignore[no-any-return]

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    got, got_bytes = logits(model_dir, dtype="float32", packed="on")
    np.testing.assert_array_equal(got, plain)
    assert got_bytes == plain_bytes


@pytest.mark.extended
def test_bfloat16_stays_plain_on_a_cpu_without_avx512() -> None:
    """oneDNN refuses to reorder it there."""
    code = """
import torch
from exo_mesh_torch.packing import MIN_ELEMENTS, PackedLinears
for dtype in (torch.float32, torch.bfloat16):
    linear = torch.nn.Linear(512, MIN_ELEMENTS // 512, dtype=dtype).requires_grad_(False)
    ones = torch.ones(3, 512, dtype=dtype)
    want = linear(ones)
    print(PackedLinears().pack(linear), torch.allclose(linear(ones), want, atol=1e-5))
"""
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**os.environ, **limits}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["True True", "False True"], done.stderr


def test_the_option_needs_a_cpu() -> None:
    assert not wants_packing({"packed": "off"}, CPU)
    assert not wants_packing({}, CPU)
    with pytest.raises(InputError, match="cannot pack weights on cuda"):
        wants_packing({"packed": "on"}, torch.device("cuda"))

"""Final hidden states, of which vectors are made: every engine gives what transformers gives, over any number of
stages. The NumPy engine is compared with transformers, the MLX and llama.cpp engines with the NumPy engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import exo_mesh_llamacpp
import exo_mesh_mlx
import exo_mesh_numpy
import exo_mesh_torch
import numpy as np
import pytest

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import EngineProvider
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.ring import Ring

IDS = np.random.default_rng(11).integers(3, 290, 96).astype(np.int32)
CUTS = [(), (3,), (1, 4)]
LONG, SHORT = 41, 23
SLACK = 1e-4
LAYERS = 6
PROVIDERS = {
    "numpy": exo_mesh_numpy.provider,
    "torch": exo_mesh_torch.provider,
    "mlx": exo_mesh_mlx.provider,
    "llamacpp": exo_mesh_llamacpp.provider,
}
OPTIONS = {"llamacpp": {"kv": "f32", "threads": "1"}}


def provider_of(engine: str) -> EngineProvider:
    look = PROVIDERS[engine].availability()
    if not look.available:
        pytest.skip(look.reason)
    return PROVIDERS[engine]


def states_of_transformers(model_dir: Path, ids: np.ndarray) -> np.ndarray:
    """transformers' own last_hidden_state, float32 `[tokens, width]`."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)  # tiny models gain nothing by threads, and wait for them on a busy machine
    model = transformers.AutoModel.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        return np.asarray(model(torch.from_numpy(ids[None].astype(np.int64))).last_hidden_state[0])


def states_of_numpy(model_dir: Path, ids: np.ndarray) -> np.ndarray:
    whole = Ring(exo_mesh_numpy.provider, model_dir, LAYERS, ())
    whole.insert(1, max_tokens=256)
    states = whole.final_states([Row(1, 0, len(ids), num_hidden=len(ids))], ids)
    whole.close()
    return states


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(
    ("engine", "arch"),
    [
        *(("torch", arch) for arch in ("llama", "qwen2", "qwen3")),
        *(("numpy", arch) for arch in ("llama", "qwen2", "qwen3")),
        *(("mlx", arch) for arch in ("llama", "qwen3")),
        *(("llamacpp", arch) for arch in ("llama", "qwen3")),
    ],
)
def test_a_ring_gives_the_final_states_of_the_whole_model(
    tmp_path: Path, engine: str, arch: str, cuts: Sequence[int]
) -> None:
    """Each text in chunks, beside another text, and beside rows that want logits or nothing."""
    by_transformers = engine in ("torch", "numpy")
    write_checkpoint(tmp_path, TinyModel(arch, layers=LAYERS, tied=by_transformers and arch == "qwen3"))
    states_of = states_of_transformers if by_transformers else states_of_numpy
    want_long, want_short = states_of(tmp_path, IDS[:LONG]), states_of(tmp_path, IDS[LONG : LONG + SHORT])
    ring = Ring(provider_of(engine), tmp_path, LAYERS, cuts, **OPTIONS.get(engine, {}))
    ring.insert(1, 2, 3)
    first = ring.final_states([Row(1, 0, 20, num_hidden=20)], IDS[:20])
    rows = [Row(1, 20, LONG - 20, num_hidden=LONG - 20), Row(3, 0, 5), Row(2, 0, SHORT, num_hidden=SHORT)]
    rest = ring.final_states(rows, np.concatenate([IDS[20:LONG], IDS[:5], IDS[LONG : LONG + SHORT]]))
    np.testing.assert_allclose(np.concatenate([first, rest[: LONG - 20]]), want_long, rtol=0, atol=SLACK)
    np.testing.assert_allclose(rest[LONG - 20 :], want_short, rtol=0, atol=SLACK)
    ring.remove(1, 2, 3)

    ring.insert(4, 5)
    last = ring.final_states([Row(4, 0, SHORT, num_hidden=1)], IDS[LONG : LONG + SHORT])
    np.testing.assert_allclose(last, want_short[-1:], rtol=0, atol=SLACK)
    mixed = [Row(5, 0, 7, 2), Row(4, SHORT - 3, 3, num_hidden=2)]
    again = ring.final_states(mixed, np.concatenate([IDS[:7], IDS[LONG + SHORT - 3 : LONG + SHORT]]))
    np.testing.assert_allclose(again, want_short[-2:], rtol=0, atol=SLACK)
    ring.close()


def test_a_text_longer_than_one_pass_of_llamacpp_has_all_its_states(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TinyModel("llama", layers=LAYERS))
    ids = np.random.default_rng(5).integers(3, 290, 200).astype(np.int32)
    ring = Ring(provider_of("llamacpp"), tmp_path, LAYERS, (2,), **OPTIONS["llamacpp"])
    ring.insert(1, max_tokens=256)
    found = ring.final_states([Row(1, 0, 200, num_hidden=200)], ids)
    np.testing.assert_allclose(found, states_of_numpy(tmp_path, ids), rtol=0, atol=SLACK)
    ring.close()


def write_body_alone(directory: Path, model: TinyModel) -> Path:
    """A checkpoint whose names lack the prefix `model.`, as those of models that were saved without a head."""
    write_checkpoint(directory, model)
    file = directory / "model.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = {name.removeprefix("model."): entry for name, entry in json.loads(raw[8 : 8 + size]).items()}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    return directory


@pytest.mark.parametrize("engine", ["mlx", "numpy", "torch"])
def test_a_checkpoint_without_a_head_has_the_states_of_one_with_full_names(tmp_path: Path, engine: str) -> None:
    model = TinyModel("qwen3", layers=4, tied=True)
    write_checkpoint(tmp_path / "full", model)
    write_body_alone(tmp_path / "bare", model)
    found = []
    for name in ("full", "bare"):
        ring = Ring(provider_of(engine), tmp_path / name, 4, (2,))
        ring.insert(1)
        found.append(ring.final_states([Row(1, 0, SHORT, num_hidden=SHORT)], IDS[:SHORT]))
        ring.close()
    np.testing.assert_array_equal(*found)

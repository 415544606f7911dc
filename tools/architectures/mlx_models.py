"""Tiny random models of mlx-lm's architectures, and what mlx-lm alone computes with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from exo_mesh_mlx import provider
from exo_mesh_mlx.engine import MlxStage
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, load_model

from tools.architectures.drafting import check_drafts
from tools.architectures.mlx_configs import architectures, num_layers, tiny_config
from tools.architectures.outcome import Outcome, compare, shown_rollback
from tools.architectures.trials import MARGIN, MAX_THREE_WAY, SCHEDULES, TOKENS, Schedule, expected
from tools.stages import Stages

NOISE = 0.1
"""Standard deviation of the noise on every floating-point parameter, so that no two layers are alike."""

TOLERANCE = 0.0
MOST_TRIPLES = MAX_THREE_WAY
RUNS_ALL = True
CRASHED = "failed"
names = architectures


def refusal(name: str) -> str:
    return ""


def variant(outcome: Outcome) -> str:
    return ""


def verdict(outcome: Outcome) -> None: ...


def write(directory: Path, name: str) -> int:
    config = tiny_config(name)
    write_checkpoint(directory, config)
    return num_layers(config)


def write_checkpoint(directory: Path, config: dict[str, Any]) -> Path:
    """Writes config.json and model.safetensors in mlx-lm's own format; returns `directory`."""
    (directory / "config.json").write_text(json.dumps(config))
    mx.random.seed(3)
    model_class, args_class = _get_classes(config)
    # ModelArgs may keep and change nested config values, so it gets a copy
    model = model_class(args_class.from_dict(json.loads(json.dumps(config))))
    parameters = {name: _with_noise(array) for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(directory / "model.safetensors"), parameters, metadata={"format": "mlx"})
    return directory


def _with_noise(array: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    return array + (NOISE * mx.random.normal(array.shape)).astype(array.dtype)


def compute_alone(directory: Path) -> list[np.ndarray]:
    """Returns float32 logits `[positions, vocab]` of each prompt by mlx-lm alone, each with its own prompt cache."""
    model, _ = load_model(directory)
    return [_alone(model, schedule, ids) for schedule, ids in zip(SCHEDULES, TOKENS, strict=True)]


def _alone(model: Any, schedule: Schedule, ids: np.ndarray) -> np.ndarray:
    cache = make_prompt_cache(model)
    parts = []
    for pos0, n in schedule:
        out = model(mx.array(ids[None, pos0 : pos0 + n]), cache=cache)[0].astype(mx.float32)
        mx.eval(out, [entry.state for entry in cache])
        parts.append(np.array(out))
    return np.concatenate(parts)


def reference(directory: Path) -> dict[str, np.ndarray]:
    return expected(compute_alone(directory), ("alone", "together", "restored"))


def survey(directory: Path, name: str) -> tuple[tuple[int, ...], str]:
    found = provider.survey(directory, {})
    return found.legal_cuts, found.reason.removeprefix(f"{directory} ")


def stages(directory: Path, outcome: Outcome) -> Stages:
    return Stages(provider, directory, outcome.layers, batch_attention="off")


def conclude(directory: Path, outcome: Outcome, stages: Stages, want: Mapping[str, np.ndarray]) -> None:
    """Notes KV and rollback of the whole model, and the tensors at the cut that most tensors cross. Compares rows that
    attend together with mlx-lm, within MARGIN instead of bit by bit."""
    (whole,) = stages.ring(())
    assert isinstance(whole, MlxStage)
    for cuts in ((), outcome.cuts[len(outcome.cuts) // 2 :][:1]):
        check_drafts(outcome, stages.ring(cuts))
    able = [[f"{one.name} {one.dtype}{list(one.item_shape)}" for one in s.capabilities.outputs] for s in stages.all()]
    outcome.traits = {"kv": whole.capabilities.kv, "rollback": shown_rollback([whole.capabilities])}
    outcome.traits |= {"crossing": max(able, key=len), "together": "yes" if whole.batched else "no"}
    blocks = Stages(provider, directory, outcome.layers)
    largest = MARGIN * float(np.sqrt(np.mean(np.square(want["alone"][np.isfinite(want["alone"])]))))
    try:
        for split in {(), outcome.cuts[:: max(1, len(outcome.cuts) - 1)][:2]}:
            if any(isinstance(stage, MlxStage) and stage.keeper.is_on for stage in blocks.ring(split)):
                outcome.traits["together"] = "in blocks"
                compare(outcome, split, blocks, {"together": want["together"]}, largest, " in blocks")
    finally:
        blocks.close()

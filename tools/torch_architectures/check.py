"""Compares a torch ring, cut in every way, with transformers' own model on the same random checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exo_mesh_torch import provider
from exo_mesh_torch.calls import cache_argument
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from exo_mesh.domain.frame import Row
from exo_mesh.engine.contract import StageEngine
from tools.stages import Stages, forward, insert, remove
from tools.torch_architectures.configs import tiny_settings
from tools.torch_architectures.families import NUM_LAYERS, VOCAB

TOLERANCE = 1e-4
"""Largest difference of float32 logits; a ring computes the same operations as the whole model, so 0.0 is expected."""

IDS = np.random.default_rng(11).integers(3, VOCAB, 47).astype(np.int32)
SCHEDULE = [(0, 23), (23, 18), *((41 + i, 1) for i in range(6))]
"""Prefill in two chunks, then six decode steps, as (pos0, n)."""

MAX_PARAMETERS = 50_000_000
"""Most parameters of a tiny model, which then takes seconds to check."""

SHORTER = (0, 5, 14)
"""In the test of several rows: how many tokens each row's prompt is shorter."""


@dataclass(frozen=True)
class Outcome:
    """The result. worst: of all cuts; rows: of several rows of different lengths that decode together."""

    cuts: tuple[int, ...]
    splits: int
    worst: float
    rows: float
    kv: tuple[str, ...]
    rollback: str


def write_random_model(directory: Path, family: str, **changes: Any) -> Path:
    """Writes a checkpoint with transformers, float32, with noise on every parameter so that no two layers are alike.
    changes: of the tiny config."""
    torch.manual_seed(3)
    config = CONFIG_MAPPING[family](**{**tiny_settings(family), **changes})
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(deepcopy(config)).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"the tiny config describes a model of {num_parameters} parameters")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def whole_model_logits(
    directory: Path, ids: np.ndarray = IDS, schedule: Sequence[tuple[int, int]] = SCHEDULE
) -> np.ndarray:
    """Returns float32 logits of every position by transformers alone, with its own cache."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # the address of a weight can change the last bit of a product
    cache: Any = DynamicCache(config=model.config)
    taken = signature(model.forward).parameters
    name = cache_argument(model)
    parts = []
    with torch.inference_mode():
        for pos0, n in schedule:
            tokens = torch.from_numpy(ids[None, pos0 : pos0 + n].astype(np.int64))
            # like generate: without positions, some models (bamba) count each chunk from 0
            more = {"position_ids": torch.arange(pos0, pos0 + n)[None]} if "position_ids" in taken else {}
            parts.append(model(tokens, use_cache=True, **{name: cache}, **more).logits[0].float().numpy())
    return np.concatenate(parts)


def split_logits(stages: Sequence[StageEngine]) -> np.ndarray:
    """Returns logits of every position by a ring, in the same schedule."""
    insert(stages, [1], 64)
    parts = [forward(stages, [Row(1, pos0, n, n)], IDS[pos0 : pos0 + n]) for pos0, n in SCHEDULE]
    remove(stages, [1])
    return np.concatenate(parts)


def rows_logits(stages: Sequence[StageEngine]) -> tuple[np.ndarray, list[int]]:
    """Returns logits of three rows with prompts of different lengths, which decode in shared frames: `[row, step,
    vocab]`."""
    starts = [41 - less for less in SHORTER]
    insert(stages, range(len(starts)), 64)
    for sequence, start in enumerate(starts):
        forward(stages, [Row(sequence, 0, start)], IDS[:start])
    steps = []
    for step in range(6):
        rows = [Row(sequence, start + step, 1, 1) for sequence, start in enumerate(starts)]
        steps.append(forward(stages, rows, [IDS[start + step] for start in starts]))
    remove(stages, range(len(starts)))
    return np.stack(steps, 1), starts


def check_rows(directory: Path, stages: Sequence[StageEngine]) -> float:
    """Returns the largest difference of several rows from each of them alone in transformers."""
    got, starts = rows_logits(stages)
    worst = 0.0
    for row, start in zip(got, starts, strict=True):
        schedule = [(0, start), *((start + i, 1) for i in range(6))]
        want = whole_model_logits(directory, IDS[: start + 6], schedule)[start:]
        worst = max(worst, float(np.abs(row - want).max()))
    return worst


def check_family(directory: Path, family: str, *, quick: bool = False) -> Outcome:
    """Checks every legal cut, in two and in three; quick: the whole, one cut and a pair. Raises the engine's errors."""
    write_random_model(directory, family)
    return check_written(directory, quick=quick)


def check_written(directory: Path, *, quick: bool = False) -> Outcome:
    """The same for an existing checkpoint."""
    cuts = provider.survey(directory, {}).legal_cuts
    want = whole_model_logits(directory)
    assert np.ptp(want) > 0.1, "the logits are all equal, so the comparison proves little"
    stages = Stages(provider, directory, NUM_LAYERS)
    splits: list[tuple[int, ...]] = [(), *((cut,) for cut in cuts), *combinations(cuts, 2)]
    if quick and len(cuts) > 1:
        splits = [(), cuts[len(cuts) // 2 :][:1], (cuts[1], cuts[-1])]
    worst = max(float(np.abs(split_logits(stages.ring(split)) - want).max()) for split in splits)
    middle = cuts[len(cuts) // 2 : len(cuts) // 2 + 1]
    ring = stages.ring(middle)
    rows = check_rows(directory, ring)
    kinds = tuple(dict.fromkeys(kind for stage in ring for kind in stage.capabilities.kv))
    rollback = "any" if all(stage.capabilities.rollback == "any" for stage in ring) else "none"
    stages.close()
    return Outcome(cuts, len(splits), worst, rows, kinds, rollback)

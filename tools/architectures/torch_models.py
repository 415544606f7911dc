"""Tiny random models of transformers' causal families, and what transformers alone computes with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exo_mesh_torch import provider
from exo_mesh_torch.calls import cache_argument
from exo_mesh_torch.families import TEXT_OF_FAMILIES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.utils import logging

from exo_mesh.domain.embedding import is_encoder
from exo_mesh.weights.model_files import read_json
from tools.architectures.drafting import check_drafts
from tools.architectures.outcome import Outcome, shown_rollback
from tools.architectures.torch_configs import causal_families, tiny_settings
from tools.architectures.torch_families import NUM_LAYERS
from tools.architectures.trials import SCHEDULES, TOKENS, expected
from tools.stages import Stages

TOLERANCE = 1e-4
"""Largest difference of float32 logits; a ring computes the same operations as the whole model, so 0.0 is expected."""

MAX_PARAMETERS = 50_000_000
"""Most parameters of a tiny model, which then takes seconds to check."""

MOST_TRIPLES = NUM_LAYERS**2
RUNS_ALL = False
CRASHED = "failed"
names = causal_families


def refusal(name: str) -> str:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not provider.supports(name):
        return "not a language model of its own, or with a cache unlike all others"
    return "an encoder: it gives vectors and scores, and no tokens" if is_encoder({"model_type": name}) else ""


def variant(outcome: Outcome) -> str:
    return ""


def verdict(outcome: Outcome) -> None: ...


def write(directory: Path, name: str) -> int:
    write_random_model(directory, name)
    return NUM_LAYERS


def write_random_model(directory: Path, family: str, **changes: Any) -> Path:
    """Writes a checkpoint with transformers, float32, with noise on every parameter so that no two layers are alike.
    changes: of the tiny config."""
    torch.manual_seed(3)
    config = CONFIG_MAPPING[family](**{**tiny_settings(family), **changes})
    auto = _auto_class(family)
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in auto.from_config(deepcopy(config)).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"the tiny config describes a model of {num_parameters} parameters")
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def _auto_class(family: str) -> Any:
    """transformers' class of the whole model, with its towers if the engine runs the text layers only."""
    return AutoModelForImageTextToText if family in TEXT_OF_FAMILIES else AutoModelForCausalLM


def whole_model_logits(
    directory: Path, ids: np.ndarray = TOKENS[0], schedule: Sequence[tuple[int, int]] = SCHEDULES[0]
) -> np.ndarray:
    """Returns float32 logits of every position by transformers alone, with its own cache."""
    family = str(read_json(directory / "config.json")["model_type"])
    model = _auto_class(family).from_pretrained(directory, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # the address of a weight can change the last bit of a product
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))
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


def reference(directory: Path) -> dict[str, np.ndarray]:
    alone = [whole_model_logits(directory, ids, schedule) for ids, schedule in zip(TOKENS, SCHEDULES, strict=True)]
    return expected(alone, ("alone", "together"))


def survey(directory: Path, name: str) -> tuple[tuple[int, ...], str]:
    found = provider.survey(directory, {})
    return found.legal_cuts, found.reason


def stages(directory: Path, outcome: Outcome) -> Stages:
    return Stages(provider, directory, outcome.layers, threads="1")


def conclude(directory: Path, outcome: Outcome, stages: Stages, want: Mapping[str, np.ndarray]) -> None:
    ring = stages.ring(outcome.cuts[len(outcome.cuts) // 2 :][:1])
    check_drafts(outcome, ring)
    able = [stage.capabilities for stage in ring]
    outcome.traits = {
        "kv": list(dict.fromkeys(kind for one in able for kind in one.kv)),
        "rollback": shown_rollback(able),
    }

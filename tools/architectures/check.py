"""Checks one architecture: writes a tiny checkpoint, finds its legal cuts, and compares split and whole runs."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from exo_mesh_mlx import provider
from exo_mesh_mlx.engine import MlxStage

from exo_mesh.errors import MeshError
from tools.architectures.checkpoint import write_checkpoint
from tools.architectures.configs import num_layers, tiny_config
from tools.architectures.sequences import Alone, compute_alone
from tools.architectures.splits import (
    Split,
    one_sequence_difference,
    restored_difference,
    splits_of,
    together_difference,
)
from tools.stages import Stages

MARGIN = 1e-4
"""Largest difference of rows that attend together, relative to the rms of the logits, in float32."""


@dataclass
class Outcome:
    """The result of one architecture. state: split, whole (cannot be cut), absent (mlx-lm cannot run it here) or
    failed; every state but split has a reason."""

    architecture: str
    state: str = "failed"
    reason: str = ""
    layers: int = 0
    legal_cuts: tuple[int, ...] = ()
    live: tuple[str, ...] = ()
    kv: tuple[str, ...] = ()
    rollback: str = ""
    batched: bool = False
    """Whether rows of several sequences go through the model together."""
    in_blocks: bool = False
    """Whether they also attend together, in at least some layers."""
    splits: int = 0
    different: dict[str, float] = field(default_factory=dict)
    """The largest difference of each split whose logits differ from mlx-lm's."""


def check(architecture: str, *, few: bool = False) -> Outcome:
    """Checks an architecture. Never raises: an error is part of the outcome. few: only some splits."""
    outcome = Outcome(architecture)
    with tempfile.TemporaryDirectory() as directory:
        try:
            config = tiny_config(architecture)
            outcome.layers = num_layers(config)
            model_dir = write_checkpoint(Path(directory), config)
            sequences = compute_alone(model_dir)
            _require_information(sequences)
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - model files of mlx-lm may do anything, exit included
            outcome.state, outcome.reason = "absent", _sentence(exc)
            if (Path(directory) / "config.json").is_file() and not _refused(Path(directory)):
                outcome.state, outcome.reason = "failed", f"the engine does not refuse it: {outcome.reason}"
            return outcome
        try:
            _check_checkpoint(model_dir, outcome, sequences, few)
        except (Exception, SystemExit) as exc:  # noqa: BLE001
            outcome.state, outcome.reason = "failed", _sentence(exc)
    return outcome


def _refused(model_dir: Path) -> bool:
    """Whether the engine refuses a model that mlx-lm cannot run, in its survey or when loading."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    try:
        provider.survey(model_dir, {})
        Stages(provider, model_dir, num_layers(config)).ring(())
    except MeshError:
        return True
    return False


def _check_checkpoint(model_dir: Path, outcome: Outcome, sequences: list[Alone], few: bool) -> None:
    survey = provider.survey(model_dir, {})
    outcome.legal_cuts, outcome.reason = survey.legal_cuts, survey.reason.removeprefix(f"{model_dir} ")
    stages = Stages(provider, model_dir, outcome.layers, batch_attention="off")
    splits = splits_of(survey.legal_cuts, few=few)
    try:
        for split in splits:
            _run_split(stages, split, outcome, sequences, restored=split in (splits[0], splits[-1]))
        _describe(stages, outcome)
    finally:
        stages.close()
    for split in {splits[0], splits[-1]}:
        _run_in_blocks(model_dir, split, outcome, sequences)
    if outcome.different:
        outcome.state, outcome.reason = "failed", "other logits than the whole model"
    else:
        outcome.state = "split" if outcome.legal_cuts else "whole"


def _run_split(stages: Stages, split: Split, outcome: Outcome, sequences: list[Alone], *, restored: bool) -> None:
    name = "|".join(map(str, split)) or "whole"
    try:
        engines = stages.ring(split)
        differences = {
            "": one_sequence_difference(engines, sequences[0]),
            " together": together_difference(engines, sequences),
            " restored": restored_difference(engines, sequences[0]) if restored else 0.0,
        }
    except (MeshError, RuntimeError) as exc:
        raise RuntimeError(f"split {name}: {exc}") from exc
    outcome.splits += 1
    outcome.different |= {name + what: worst for what, worst in differences.items() if worst}


def _run_in_blocks(model_dir: Path, split: Split, outcome: Outcome, sequences: list[Alone]) -> None:
    """Compares rows that attend together with mlx-lm, within MARGIN instead of bit by bit."""
    stages = Stages(provider, model_dir, outcome.layers)
    try:
        engines = stages.ring(split)
        if not any(isinstance(engine, MlxStage) and engine.keeper.is_on for engine in engines):
            return
        outcome.in_blocks = True
        logits = np.concatenate([logits[np.isfinite(logits)] for alone in sequences for logits in alone.logits])
        worst = together_difference(engines, sequences)
        if not worst <= MARGIN * float(np.sqrt(np.mean(np.square(logits)))):
            outcome.different["|".join(map(str, split)) + " in blocks"] = worst
    finally:
        stages.close()


def _describe(stages: Stages, outcome: Outcome) -> None:
    """Describes KV and rollback of the whole model, and the tensors at the cut that most tensors cross."""
    (whole,) = stages.ring(())
    assert isinstance(whole, MlxStage)
    outcome.kv, outcome.rollback = whole.capabilities.kv, whole.capabilities.rollback
    outcome.batched = whole.batched
    for stage in stages.all():
        specs = stage.capabilities.outputs
        crossing = tuple(f"{spec.name} {spec.dtype}{list(spec.item_shape)}" for spec in specs)
        outcome.live = max(outcome.live, crossing, key=len)


def _require_information(sequences: list[Alone]) -> None:
    """Raises if the model gives equal or invalid logits, because that would hide every mistake."""
    last = np.stack([alone.logits[-1][-1] for alone in sequences])
    finite = last[:, np.isfinite(last).all(axis=0)]
    if np.isnan(last).any() or finite.size == 0 or np.ptp(finite) == 0 or np.ptp(finite, axis=0).max() == 0:
        raise RuntimeError("the tiny model's logits say nothing: not a number, or all the same")


def _sentence(exc: BaseException) -> str:
    if isinstance(exc, SystemExit):
        return "its model file ends the process, as a library that it needs is not installed"
    text = " ".join(str(exc).split()) or type(exc).__name__
    return text if isinstance(exc, MeshError) else f"{type(exc).__name__}: {text}"

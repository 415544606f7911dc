"""Judges one family of transformers: exact, whole only, refused, not judged, or failed."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from exo_mesh_torch import provider
from transformers.utils import logging

from exo_mesh.domain.embedding.tasks import is_encoder
from exo_mesh.errors import MeshError, ModelError
from tools.torch_architectures.check import TOLERANCE, Outcome, check_written, whole_model_logits, write_random_model


@dataclass(frozen=True)
class Judgement:
    """The result. state: exact, whole (cannot be cut), refused (by the engine), absent (transformers itself cannot run
    the tiny model here) or failed; every state but exact has a reason."""

    family: str
    state: str
    reason: str = ""
    outcome: Outcome | None = None


def judge(family: str, *, quick: bool = True) -> Judgement:
    """Judges a family. Never raises. quick: three splits, if the family can be cut; else all."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not provider.supports(family):
        return Judgement(family, "refused", "not a language model of its own, or with a cache unlike all others")
    if is_encoder({"model_type": family}):
        return Judgement(family, "refused", "an encoder: it gives vectors and scores, and no tokens")
    with tempfile.TemporaryDirectory() as directory:
        return _judge(Path(directory), family, quick)


def failed(family: str, reason: str) -> Judgement:
    return Judgement(family, "failed", reason)


def _judge(directory: Path, family: str, quick: bool) -> Judgement:
    try:
        write_random_model(directory, family)
    except Exception as exc:  # noqa: BLE001 - configs and models may raise anything
        return Judgement(family, "absent", _sentence(exc))
    try:
        survey = provider.survey(directory, {})
    except ModelError as exc:
        return Judgement(family, "refused", _sentence(exc).replace(f"{directory}/", ""))
    except Exception as exc:  # noqa: BLE001
        return failed(family, _sentence(exc))
    try:
        want = whole_model_logits(directory)
        if not want.max() - want.min() > 0.1:
            return Judgement(family, "absent", "the tiny model's logits say nothing: not a number, or all the same")
    except Exception as exc:  # noqa: BLE001
        return Judgement(family, "absent", _sentence(exc))
    try:
        outcome = check_written(directory, quick=quick)
    except Exception as exc:  # noqa: BLE001
        return failed(family, _sentence(exc))
    if max(outcome.worst, outcome.rows) > TOLERANCE:
        return Judgement(family, "failed", f"other logits than the whole model: {outcome.worst:.1e}", outcome)
    return Judgement(family, "exact" if outcome.cuts else "whole", survey.reason, outcome)


def _sentence(exc: Exception) -> str:
    text = " ".join(str(exc).split()) or type(exc).__name__
    return text if isinstance(exc, MeshError) else f"{type(exc).__name__}: {text}"

"""The result of checking an architecture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from exo_mesh.engine.contract import Capabilities
from exo_mesh.errors import MeshError
from tools.architectures.trials import Split, differences
from tools.stages import Stages


@dataclass
class Outcome:
    """The result of one architecture. state: exact, whole (cannot be cut), refused (by the engine), absent (the library
    itself cannot run the tiny model here) or failed; every state but exact has a reason."""

    name: str
    state: str = "failed"
    reason: str = ""
    layers: int = 0
    cuts: tuple[int, ...] = ()
    splits: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    """By part of the trials: the largest difference of any logit in any split."""
    different: dict[str, float] = field(default_factory=dict)
    """By split and part: differences above the tolerance."""
    traits: dict[str, Any] = field(default_factory=dict)
    """What the engine says of the model, for the columns of its page."""


def compare(
    outcome: Outcome, split: Split, stages: Stages, want: Mapping[str, np.ndarray], tolerance: float, what: str = ""
) -> None:
    """Notes how far the logits of a split are from the library's."""
    name = "|".join(map(str, split)) or "whole"
    try:
        found = differences(stages.ring(split), want)
    except (MeshError, RuntimeError) as exc:
        raise RuntimeError(f"split {name}: {exc}") from exc
    for part, worst in found.items():
        outcome.worst[part + what] = max(worst, outcome.worst.get(part + what, 0.0))
        if not worst <= tolerance:
            outcome.different[f"{name} {part}{what}"] = worst


def shown_rollback(stages: Iterable[Capabilities]) -> str:
    """How far all stages can cut a sequence back, as the tables show it."""
    stages = list(stages)
    if all(one.cuts_anywhere for one in stages):
        return "any"
    least = min(one.rollback for one in stages)
    return f"{least}{' at rows' if any(one.cuts_at_rows for one in stages) else ''}" if least else "none"

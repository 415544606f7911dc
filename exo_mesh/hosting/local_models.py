"""The models on this machine's disk as a stage needs them, and whether a stage of a plan could ever run here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.plan import Plan
from exo_mesh.errors import MeshError, ReservationError


@dataclass(frozen=True, slots=True)
class LocalModels:
    """What a stage host asks of the models on disk; both may raise UnknownModelError or ModelError, and block."""

    card: Callable[[str], ModelCard]
    find: Callable[[str], Path]


async def refuse_misfit(
    plan: Plan, index: int, own_id: str, models: LocalModels, can_run: Callable[[str, str], str]
) -> None:
    """Raises ReservationError if a stage can never run here: wrong peer, model, digest or engine.

    `can_run(engine, architecture)` says why it cannot, or "".
    """
    if not 0 <= index < len(plan.stages) or own_id not in plan.stages[index].peers:
        raise ReservationError(f"stage {index} of the plan is not of this peer", peer_id=own_id)
    try:
        card = await asyncio.to_thread(models.card, plan.model)
    except MeshError as exc:
        raise ReservationError(str(exc), peer_id=own_id) from exc
    if card.digest != plan.model_digest:
        raise ReservationError(
            f"the files of {plan.model} here have digest {card.digest[:12]}, the plan means "
            f"{plan.model_digest[:12]}: the peers hold different versions of the model",
            peer_id=own_id,
        )
    if problem := can_run(plan.stages[index].engine, card.architecture):
        raise ReservationError(problem, peer_id=own_id)

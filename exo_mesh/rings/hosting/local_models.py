"""Gives a stage its model files on this machine, and decides whether a stage of a plan could ever run here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from exo_mesh.domain.download import FetchStep
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.plan import Plan
from exo_mesh.domain.whole.served import ServedModel
from exo_mesh.errors import FetchError, MeshError, ReservationError


async def _fetch_nothing(model: str, digest: str) -> None:
    pass


async def _all_is_here(plan: Plan, index: int) -> AsyncGenerator[FetchStep, None]:
    steps: tuple[FetchStep, ...] = ()
    for step in steps:
        yield step


class LocalModels(msgspec.Struct, frozen=True):
    """The functions by which a stage host gets models on disk.

    card, find: may raise UnknownModelError or ModelError, and block. introduce: gets config, tokenizer and headers of a
    model, by name and digest, from peers if they are not here; may raise FetchError or ModelError. fetch: brings the
    weights for a stage of a plan, and reports its progress until they are here; may raise FetchError. served: the model
    of this name that a model server beside this node serves, None if none does. server_options: the settings of its
    whole-model engine for it.
    """

    card: Callable[[str], ModelCard]
    find: Callable[[str], Path]
    introduce: Callable[[str, str], Awaitable[None]] = _fetch_nothing
    fetch: Callable[[Plan, int], AsyncGenerator[FetchStep, None]] = _all_is_here
    served: Callable[[str], ServedModel | None] = lambda name: None
    server_options: Callable[[ServedModel], Mapping[str, str]] = lambda model: {}


async def refuse_misfit(
    plan: Plan, index: int, own_id: str, models: LocalModels, can_run: Callable[[str, str], str]
) -> None:
    """Raises ReservationError if a stage can never run here: wrong peer, model, digest or engine.

    `can_run(engine, architecture)` returns the reason why it cannot, or "" if it can.
    """
    if not 0 <= index < len(plan.stages) or own_id not in plan.stages[index].peers:
        raise ReservationError(f"stage {index} of the plan does not belong to this peer", peer_id=own_id)
    try:
        if not plan.takes_text:
            await models.introduce(plan.model, plan.model_digest)
        card = await asyncio.to_thread(models.card, plan.model)
    except FetchError as exc:
        raise ReservationError(exc.full, peer_id=own_id) from exc
    except MeshError as exc:
        raise ReservationError(str(exc), peer_id=own_id) from exc
    if card.digest != plan.model_digest:
        raise ReservationError(
            f"the files of {plan.model} here have digest {card.digest[:12]}, the plan needs "
            f"{plan.model_digest[:12]}: the peers hold different versions of the model",
            peer_id=own_id,
        )
    if problem := can_run(plan.stages[index].engine, card.architecture):
        raise ReservationError(problem, peer_id=own_id)

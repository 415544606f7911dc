"""Chooses the program that serves a model, by the tasks on its card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from exo_mesh.errors import InputError
from exo_mesh.models.cards.toml_card import Task

RUNNERS: Final[Mapping[Task, str | None]] = {
    "text_generation": "exo_mesh.rings.runner",
    "embeddings": "exo_mesh.rings.runner",
    "rerank": "exo_mesh.rings.runner",
    "image_generation": None,
    "drafting": None,
}
"""The module that a runner process executes for a task; None: this version has none."""

_SERVED = "text generation, embeddings and reranking"


def runner_of(name: str, tasks: Sequence[Task]) -> str:
    """Returns the module for the first task that can be served. Raises InputError if none can."""
    for task in tasks:
        if (module := RUNNERS[task]) is not None:
            return module
    what = " and ".join(task.replace("_", " ") for task in tasks) or "nothing"
    message = f"{name} is for {what}, which this version does not serve; it serves " + _SERVED
    raise InputError(message, param="model")

"""Places the models of --preload as soon as the mesh can hold them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from exo_mesh.domain.model import ModelCard
from exo_mesh.errors import InstanceDeletedError, MeshError
from exo_mesh.rings.placing.instances import Instances
from exo_mesh.rings.placing.spec import InstanceSpec

PRELOAD_SETTLE_S = 5.0
"""Delay between the start of a node and its first preload: its peers may still be starting."""

PRELOAD_RETRY_S = 15.0

_log = logging.getLogger(__name__)


async def preload(instances: Instances, models: Sequence[str], find: Callable[[str], Awaitable[ModelCard]]) -> None:
    """Place each model once unless it has an instance, and retry until each was placed: after a power cut, peers
    come back one by one. An instance that is deleted later stays deleted. find: returns the model card for a
    name."""
    missing, warned = list(models), set[str]()
    pause_s = PRELOAD_SETTLE_S
    while missing:
        await asyncio.sleep(pause_s)
        pause_s = PRELOAD_RETRY_S
        for name in list(missing):
            try:
                await instances.ensure(InstanceSpec((await find(name)).name))
                missing.remove(name)
            except InstanceDeletedError:
                missing.remove(name)
            except MeshError as exc:
                level = logging.DEBUG if name in warned else logging.WARNING
                _log.log(level, "cannot preload %s yet, retrying: %s", name, exc)
                warned.add(name)

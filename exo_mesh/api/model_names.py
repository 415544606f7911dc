"""How a request names a model: by its name, and by a path only for callers who may do anything on this node."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from exo_mesh.api.access import CALLER
from exo_mesh.errors import UnknownModelError
from exo_mesh.node.service import MeshService
from exo_mesh.security.api_keys import Role

MAX_PATH = 4096  # PATH_MAX of Linux; what is longer names no directory


async def named_model(request: web.Request, service: MeshService, name: str) -> str:
    """`name` itself, or if it is an absolute path, the name of the model in that directory.

    A path is only compared with the directories of the models that the node lists, so it opens nothing else. Others
    than admins are not told whether it is one of them. Raises UnknownModelError.
    """
    if not name.startswith("/"):
        return name
    if not may_name_paths(request) or len(name) > MAX_PATH:
        raise UnknownModelError("model is a path; name a model as GET /v1/models lists it", param="model")
    return await service.model_at(Path(name))


async def model_of_request(
    request: web.Request, service: MeshService, name: str | None, default: str = ""
) -> str | None:
    """The model that a request names, else the default one of this node, which may be a path whoever asks; None if
    there is neither. Raises UnknownModelError."""
    if name is not None:
        return await named_model(request, service, name)
    if default.startswith("/"):
        return await service.model_at(Path(default))
    return default or None


def may_name_paths(request: web.Request) -> bool:
    """Whether the caller has the rights of an admin, who may learn which directories this node has."""
    return request[CALLER].role is Role.ADMIN

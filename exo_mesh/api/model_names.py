"""Finds the model that a request names. All callers may use a name; only admins may use a path.

A name that no peer knows is looked up at the hub, if the caller may start downloads.
"""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from exo_mesh.api.access import CALLER
from exo_mesh.errors import MeshError, NotFetchedError, UnknownModelError
from exo_mesh.models.entry import ModelEntry
from exo_mesh.node.model_service import ModelService
from exo_mesh.security.api_keys import Role

MAX_PATH = 4096  # PATH_MAX of Linux; no directory has a longer path


class DownloadRefusedError(MeshError):
    """No peer has the model, and the caller may not start downloads."""

    code = "insufficient_permissions"


async def named_model(request: web.Request, models: ModelService, name: str) -> str:
    """Returns `name`, or if it is an absolute path, the name of the model in that directory.

    A path is only compared with the directories of the models that the node lists, so no other directory is opened.
    Callers who are not admins get the same error for every path. Raises UnknownModelError.
    """
    if len(name) > MAX_PATH:
        raise UnknownModelError(f"model has {len(name)} characters; at most {MAX_PATH} are allowed", param="model")
    if not name.startswith("/"):
        return name
    if not may_name_paths(request):
        raise UnknownModelError("model is a path; use a name that GET /v1/models lists", param="model")
    return await models.at(Path(name))


async def model_of_request(
    request: web.Request, models: ModelService, name: str | None, default: str = ""
) -> str | None:
    """The model that a request names, else this node's default model; None if there is neither. "" names no model.

    The default may be a path for every caller, because the operator has set it. Raises UnknownModelError.
    """
    if name:
        return await named_model(request, models, name)
    if default.startswith("/"):
        return await models.at(Path(default))
    return default or None


def may_name_paths(request: web.Request) -> bool:
    """Whether the caller is an admin, and so may learn which directories this node has."""
    return request[CALLER].role is Role.ADMIN


async def find_model(models: ModelService, name: str, *, may_download: bool) -> ModelEntry:
    """Find a model of the mesh or, if the caller may download, of the hub. Raises DownloadRefusedError if only the hub
    may have the model and the caller may not download; all other errors are those of ModelService.find."""
    try:
        return await models.find(name, may_download=may_download)
    except NotFetchedError as exc:
        raise DownloadRefusedError(
            f"{exc}. Downloading a model needs local rights or a key, and this request has neither. Use exo-mesh on "
            "the node's own machine as its user, or send a key (`exo-mesh key new` on the node makes one), or use "
            "a model that GET /v1/models lists"
        ) from exc

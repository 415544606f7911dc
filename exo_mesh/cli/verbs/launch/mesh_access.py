"""Which model of the mesh an agent uses, and with which key."""

from __future__ import annotations

import os
import urllib.parse
from typing import Any

import msgspec

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.errors import InputError, MeshError, PlacementError

NO_KEY = "unused"
"""The key for an open mesh, which ignores it; agents do not start without one."""
_PREVIEW_S = 60.0
UNKNOWN_CONTEXT = 32_768
"""Assumed for a model of a model server that does not say how long its context is."""


class LaunchKey(msgspec.Struct, frozen=True):
    """text: the key that the agent sends. id: of a key that was made for this run, and is to be revoked; else ""."""

    text: str
    id: str = ""


class LaunchModel(msgspec.Struct, frozen=True):
    """context_tokens: of its instance, or of the instance that would be placed. is_loaded: an instance is ready."""

    name: str
    context_tokens: int
    is_loaded: bool


def find_launch_model(client: ApiClient, wanted: str) -> LaunchModel:
    """The model by a name or alias; without one, the only loaded model or else the only model. Raises InputError if
    there is no such model or a choice, and PlacementError if the mesh cannot hold it."""
    entry = client.get(f"/v1/models/{urllib.parse.quote(wanted)}") if wanted else _only(client)
    name, limit = str(entry["id"]), int(entry["context_length"])
    if entry["instance_ids"]:
        placed = client.get("/state")["view"]["instances"]
        limits = [one["context_limit"] for one in placed if one["id"] in entry["instance_ids"]]
        return LaunchModel(name, min([limit, *limits]) or UNKNOWN_CONTEXT, is_loaded=True)
    if entry["status"] == "served":
        return LaunchModel(name, limit or UNKNOWN_CONTEXT, is_loaded=False)
    query = urllib.parse.urlencode({"model": name})
    previews: list[dict[str, Any]] = client.get(f"/instance/previews?{query}", _PREVIEW_S)["previews"]
    possible = [preview["context_limit"] for preview in previews if "refused" not in preview]
    if not possible:
        why = next((preview["refused"]["message"] for preview in previews), "no peer can hold it")
        raise PlacementError(f"{name} cannot be loaded: {why}")
    return LaunchModel(name, min(limit or possible[0], possible[0]), is_loaded=False)


def _only(client: ApiClient) -> dict[str, Any]:
    """The only loaded model, else the only model. Raises InputError."""
    models: list[dict[str, Any]] = client.get("/v1/models")["data"]
    loaded = [entry for entry in models if entry["instance_ids"]]
    for candidates in (loaded, models):
        if len(candidates) == 1:
            return candidates[0]
    if not models:
        raise InputError("the mesh has no model; `exo-mesh pull MODEL` downloads one", param="model")
    names = ", ".join(str(entry["id"]) for entry in (loaded or models)[:10])
    raise InputError(f"name a model with --model; the mesh has {names}", param="model")


def take_key(client: ApiClient) -> LaunchKey:
    """A key for one run. On an open mesh none is made, because the first key closes the API to everybody without one.
    Raises MeshError if the mesh needs a key and this caller has neither rights to make one nor a key of its own."""
    if client.is_open():
        return LaunchKey(NO_KEY)
    own = os.environ.get("EXO_MESH_API_KEY", "")
    try:
        made = client.post("/v1/keys", {"role": "use"})
    except MeshError as exc:
        if own and exc.code == "insufficient_permissions":
            return LaunchKey(own)  # a key with the role `use` can make no other; it is what the agent needs
        raise
    return LaunchKey(str(made["key"]), str(made["id"]))


def revoke_key(client: ApiClient, key_id: str) -> bool:
    """Revoke a key; False if it may still be valid."""
    try:
        client.delete(f"/v1/keys/{urllib.parse.quote(key_id)}")
    except MeshError as exc:
        return exc.code == "not_found"
    return True

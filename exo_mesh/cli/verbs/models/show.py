"""Show one model: size, context, which peers have which layers, when it was last used, and whether it fits this mesh.

A model that no peer has is looked up on the hub, which downloads its config and headers but no weights.
"""

from __future__ import annotations

import argparse
import time
import urllib.parse
from typing import Any

from exo_mesh.base.printable import counted
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags, model_argument
from exo_mesh.cli.tables import peer_names, print_json, ring_line, say
from exo_mesh.cli.verbs.models import facts
from exo_mesh.errors import MeshError

_DEADLINE_S = 150.0
"""An engine may first have to trace the model to find where it can be cut."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, `--api-url`, `--json`."""
    parser.add_argument(
        "model", metavar="MODEL", type=model_argument, help="hub id, or a name that exo-mesh list shows"
    )
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the model. `/instance/previews` looks it up on the hub; `/v1/models/…` and others have the rest."""
    client = ApiClient(args.api_url, args.home)
    model = _shown(client, args.model)
    if args.json:
        print_json(model)
        return exit_codes.OK
    print(model["id"])
    for label, text in _lines(model, client.get("/state"), client.get("/v1/download/progress")["data"]):
        say(f"  {label.ljust(11)}{text}", hanging=13)
    return exit_codes.OK


def _shown(client: ApiClient, name: str) -> dict[str, Any]:
    """The model with `fits` and `used_at` added. Raises UnknownModelError and other MeshErrors."""
    query = urllib.parse.urlencode({"model": name})
    try:
        answer = client.get(f"/instance/previews?{query}", _DEADLINE_S)
        name, fits = answer["model"], facts.previewed_fit(answer["previews"])
    except MeshError as exc:
        if exc.code not in ("no_placement", "pending", "memory_pressure"):
            raise
        fits = f"no: {exc}"
    model: dict[str, Any] = client.get(f"/v1/models/{facts.model_path(name)}")
    stored = {entry["name"]: entry for entry in client.get("/store/storage")["models"]}
    return {**model, "fits": fits, "used_at": stored.get(model["id"], {}).get("used_at")}


def _size(model: dict[str, Any]) -> str:
    if facts.is_served(model):
        return "nothing of it is in the mesh: a model server has it"
    text = f"{facts.size_text(model['num_bytes'])} in {counted(model['num_layers'] or '?', 'layer')}"
    on_disk = model.get("disk_bytes", 0)
    return f"{text}, of which {facts.size_text(on_disk)} stay on disk" if on_disk else text


def _lines(model: dict[str, Any], state: dict[str, Any], downloads: list[dict[str, Any]]) -> list[tuple[str, str]]:
    names = peer_names(state)
    rings = [ring_line(instance, names) for instance in state["view"]["instances"] if instance["model"] == model["id"]]
    return [
        ("size", _size(model)),
        ("quant", facts.quantisation(model)),
        ("tasks", ", ".join(task.replace("_", " ") for task in model.get("tasks", ())) or "?"),
        ("takes", facts.input_modalities(model)),
        ("context", f"{facts.context_text(model)} tokens"),
        ("peers", facts.holders(model, names)),
        ("layers", facts.held_layers(model, state, downloads)),
        *[("unverified", text) for text in facts.unverified(model, state, names)],
        *[("loaded", ring) for ring in rings],
        ("last used", facts.ago(model["used_at"], time.time())),
        ("fits", model["fits"]),
    ]

"""Unload a model on all peers and free its memory. Its running requests end. `exo-mesh ps` lists the instances."""

from __future__ import annotations

import argparse
import urllib.parse

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient, NoNodeError
from exo_mesh.cli.parser import add_api_flags, model_argument
from exo_mesh.cli.verbs.models.facts import model_path
from exo_mesh.errors import InputError, MeshError

_DEADLINE_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, `--api-url`."""
    parser.add_argument(
        "instance", metavar="INSTANCE", type=model_argument, help="name of a model, or the id of an instance"
    )
    add_api_flags(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """Calls `DELETE /instance/{id}` for the instance, or for each instance of the model."""
    client = ApiClient(args.api_url, args.home)
    instances = client.get("/state")["view"]["instances"]
    ids = [item["id"] for item in instances if args.instance in (item["id"], item["model"])]
    if not ids and (model := _model_named(client, args.instance)):
        ids = [item["id"] for item in instances if item["model"] == model]
    if not ids:
        raise InputError(f"no instance or loaded model {args.instance}; see exo-mesh ps", param="instance")
    for instance_id in ids:
        client.delete(f"/instance/{urllib.parse.quote(instance_id, safe='')}", _DEADLINE_S)
        print(f"stopped {instance_id}")
    return exit_codes.OK


def _model_named(client: ApiClient, name: str) -> str:
    """The full name for an alias or short name of a model; "" if there is none."""
    try:
        return str(client.get(f"/v1/models/{model_path(name)}")["id"])
    except NoNodeError:
        raise
    except MeshError:
        return ""

"""List the models that some live peer has on its disk, and those that the node called has but cannot use, with why."""

from __future__ import annotations

import argparse

from exo_mesh.cli import exit_codes
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import print_json
from exo_mesh.client.api_client import ApiClient
from exo_mesh.telemetry.tables import columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--api-url`, `--json`."""
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Ask `/v1/models` and `/state`."""
    client = ApiClient(args.api_url, args.home)
    models = client.get("/v1/models")["data"]
    unusable = client.get("/v1/models?status=unusable")["data"]
    if args.json:
        print_json([*models, *unusable])
        return exit_codes.OK
    loaded = {instance["model"] for instance in client.get("/state")["view"]["instances"]}
    rows = [[model["id"], "loaded" if model["id"] in loaded else "on disk"] for model in models]
    rows += [[model["id"], f"unusable: {model['reason']}"] for model in unusable]
    print(columns(("MODEL", "STATE"), rows))
    return exit_codes.OK

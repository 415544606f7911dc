"""Show the peers and, for each model that is loaded, the ring: who holds which layers."""

from __future__ import annotations

import argparse
from typing import Any

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client import ApiClient
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import columns, layers_text, peer_names, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--api-url`, `--json`."""
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Ask `/v1/topology` for --json, `/state` for people."""
    client = ApiClient(args.api_url)
    if args.json:
        print_json(client.get("/v1/topology"))
        return exit_codes.OK
    state, topology = client.get("/state"), client.get("/v1/topology")
    names = peer_names(state)
    rows = [
        [names[peer["id"]], "yes" if peer["alive"] else "no", ", ".join(peer.get("addresses", ()))]
        for peer in state["view"]["peers"]
    ]
    print(columns(("PEER", "ALIVE", "ADDRESSES"), rows))
    _print_links(topology, names)
    for instance in state["view"]["instances"]:
        print(f"\n{instance['model']}, instance {instance['id']}, {instance['state']}")
        stages = [
            [names.get(stage["peer"], stage["peer"][:8]), layers_text(stage["layers"]), stage["engine"]]
            for stage in instance["stages"]
        ]
        print(columns(("  STAGE", "LAYERS", "ENGINE"), [["  " + row[0], *row[1:]] for row in stages]))
    return exit_codes.OK


def _print_links(topology: dict[str, Any], names: dict[str, str]) -> None:
    """The ways by which the node that was asked reaches the others, and whom it refused."""
    rows = [
        [names.get(link["to"], link["to"][:8]), link["address"], _number(link["rtt_ms"]), _number(link["mb_per_s"])]
        for link in topology["links"]
    ]
    if rows:
        print("\n" + columns(("LINK TO", "ADDRESS", "MS", "MB/S"), rows))
    if topology["refused"]:
        print("\nrefused:\n" + "\n".join(f"  {reason}" for reason in topology["refused"]))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

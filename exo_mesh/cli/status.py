"""Say how the node is: its health, the peers it sees and the models that are loaded."""

from __future__ import annotations

import argparse
from typing import Any

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client import ApiClient
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import columns, human_bytes, peer_names, print_json, ring_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--api-url`, `--json`."""
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Ask `/state`."""
    client = ApiClient(args.api_url)
    state = client.get("/state")
    health = state["health"]
    if args.json:
        print_json(state)
        return exit_codes.OK
    print(f"{client.url}: {health['status']}")
    for reason in health.get("reasons", ()):
        print(f"  {reason['message']}  {reason.get('remedy', '')}".rstrip())
    print(columns(("PEER", "ID", "ALIVE", "ENGINE", "USABLE", "RESERVED", "TAGS"), _peer_rows(state)))
    names = peer_names(state)
    for instance in state["view"]["instances"]:
        print(f"{instance['model']} ({instance['state']}): {ring_line(instance, names)}")
    return exit_codes.OK


def _peer_rows(state: dict[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = []
    for peer in state["view"]["peers"]:
        reading = state["telemetry"].get(peer["id"], {})
        engine = next((device["engine"] for device in peer["devices"]), "") or "none"
        memory = [human_bytes(reading[key]) if key in reading else "?" for key in ("usable_bytes", "reserved_bytes")]
        tags = " ".join(peer.get("tags", ()))
        rows.append([peer["name"], peer["id"][:8], "yes" if peer["alive"] else "no", engine, *memory, tags])
    return rows

"""Show the health of a node, the peers that it sees and the models that are loaded."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from exo_mesh.cli import exit_codes
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import peer_names, print_json, ring_line
from exo_mesh.client.api_client import ApiClient
from exo_mesh.telemetry.tables import columns, human_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--api-url`, `--home`, `--json`."""
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints `GET /state`."""
    client = ApiClient(args.api_url, args.home)
    state = client.get("/state")
    health = state["health"]
    if args.json:
        print_json(state)
        return exit_codes.OK
    print(f"{client.url}: {health['status']}")
    _print_reasons(health.get("reasons", ()))
    print(columns(("PEER", "ID", "HEALTH", "ENGINE", "USABLE", "RESERVED", "TAGS"), _peer_rows(state)))
    for peer in health.get("peer_health", ()):
        if peer["id"] != state["node_id"] and peer["reasons"]:
            print(f"{peer['name']}:")
            _print_reasons(peer["reasons"])
    names, levels = peer_names(state), {one["id"]: one for one in health.get("instance_health", ())}
    for instance in state["view"]["instances"]:
        print(f"{instance['model']} ({instance['state']}): {ring_line(instance, names)}")
        _print_reasons(levels.get(instance["id"], {}).get("reasons", ()))
    return exit_codes.OK


def _print_reasons(reasons: Iterable[dict[str, str]]) -> None:
    """Prints each problem, and its remedy below it."""
    for reason in reasons:
        level = reason.get("level", "degraded")
        print(f"  {'note' if level == 'ok' else level}: {reason['message']}")
        if reason.get("remedy"):
            print(f"    -> {reason['remedy']}")


def _peer_rows(state: dict[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = []
    levels = {one["id"]: one["level"] for one in state["health"].get("peer_health", ())}
    for peer in state["view"]["peers"]:
        reading = state["telemetry"].get(peer["id"], {})
        engine = next((device["engine"] for device in peer["devices"]), "") or "none"
        memory = [human_bytes(reading[key]) if key in reading else "?" for key in ("usable_bytes", "reserved_bytes")]
        tags = " ".join(peer.get("tags", ()))
        rows.append([peer["name"], peer["id"][:8], levels.get(peer["id"], "ok"), engine, *memory, tags])
    live = {peer["id"] for peer in state["view"]["peers"]}
    for gone in state["health"].get("peer_health", ()):
        if gone["id"] not in live:
            asleep = any(reason["code"] == "asleep" for reason in gone["reasons"])
            rows.append([gone["name"], gone["id"][:8], "asleep" if asleep else gone["level"], "", "", "", ""])
    return rows

"""Show the health of a node, the peers that it sees and the models that are loaded."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from exo_mesh.base.printable import printable
from exo_mesh.base.telemetry.tables import human_bytes
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import peer_names, people_console, print_json, print_table, ring_line, state_text

if TYPE_CHECKING:
    from rich.console import Console

_PEER_HEADER = ("PEER", "HEALTH", "ENGINE", "FREE", "USED BY MODELS", "ID", "ROLE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--api-url`, `--home`, `--json`."""
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints `GET /state`."""
    client = ApiClient(args.api_url, args.home)
    state = client.get("/state")
    if args.json:
        print_json(state)
        return exit_codes.OK
    print_status(people_console(), client.url, state)
    return exit_codes.OK


def print_status(console: Console, url: str, state: Mapping[str, Any]) -> None:
    """Prints what `GET /state` of the node at `url` answered, for people."""
    health, names = state["health"], peer_names(dict(state))
    console.print(f"{url}: ", state_text(health["status"].replace("_", " ")), sep="", soft_wrap=not console.is_terminal)
    _print_reasons(console, health["reasons"])
    has_roles = any(peer["role"] != "full" for peer in state["view"]["peers"])
    shown = len(_PEER_HEADER) if has_roles else len(_PEER_HEADER) - 1
    print_table(console, _PEER_HEADER[:shown], [row[:shown] for row in _peer_rows(state, names)])
    for peer in state["view"]["peers"]:
        for line in _server_lines(peer):
            console.print(line, soft_wrap=not console.is_terminal)
    for peer in health["peer_health"]:
        if peer["id"] != state["node_id"] and peer["reasons"]:
            console.print(f"{names.get(peer['id'], printable(peer['name']))}:", soft_wrap=not console.is_terminal)
            _print_reasons(console, peer["reasons"])
    instances, details = state["view"]["instances"], {one["id"]: one for one in health["instance_health"]}
    if not instances:
        console.print("no model is loaded")
        return
    rows = [[item["model"], state_text(item["state"]), ring_line(item, names), item["id"]] for item in instances]
    print_table(console, ("MODEL", "STATE", "PEERS AND LAYERS", "INSTANCE"), rows)
    for instance in instances:
        if reasons := details.get(instance["id"], {}).get("reasons", ()):
            console.print(f"{printable(instance['id'])}:", soft_wrap=not console.is_terminal)
            _print_reasons(console, reasons)


def _server_lines(peer: Mapping[str, Any]) -> list[str]:
    """One line for each model server beside a peer: requests leave the mesh there, as text."""
    by_server: dict[str, list[str]] = {}
    for one in peer["served"]:
        by_server.setdefault(f"{printable(one['engine'])} at {printable(one['server'])}", []).append(one["name"])
    return [
        f"{printable(peer['name'])} passes text to {server}, which serves {printable(', '.join(names))}"
        for server, names in by_server.items()
    ]


def _print_reasons(console: Console, reasons: Iterable[Mapping[str, str]]) -> None:
    """Prints each problem, and its remedy below it."""
    for reason in reasons:
        word = state_text("note" if reason["level"] == "ok" else reason["level"])
        console.print("  ", word, f": {printable(reason['message'])}", sep="", soft_wrap=not console.is_terminal)
        if reason["remedy"]:
            console.print(f"    -> {printable(reason['remedy'])}", soft_wrap=not console.is_terminal)


def _peer_rows(state: Mapping[str, Any], names: Mapping[str, str]) -> list[list[object]]:
    """The rows of all peers, with their roles as the last column."""
    rows: list[list[object]] = []
    levels = {one["id"]: one["level"] for one in state["health"]["peer_health"]}
    for peer in state["view"]["peers"]:
        reading = state["telemetry"].get(peer["id"], {})
        here = " (here)" if peer["id"] == state["node_id"] else ""
        engine = next((device["engine"] for device in peer["devices"]), "") or "none"
        figures = [reading.get(key) for key in ("usable_bytes", "reserved_bytes")]
        memory = ["unknown" if one is None else human_bytes(one) for one in figures]
        health = state_text("draining" if reading.get("draining") else levels.get(peer["id"], "ok"))
        rows.append([f"{names[peer['id']]}{here}", health, engine, *memory, peer["id"][:8], peer["role"]])
    live = {peer["id"] for peer in state["view"]["peers"]}
    for gone in state["health"]["peer_health"]:
        if gone["id"] not in live:
            asleep = any(reason["code"] == "asleep" for reason in gone["reasons"])
            health = state_text("asleep" if asleep else gone["level"])
            rows.append([names[gone["id"]], health, "", "", "", gone["id"][:8], ""])
    return rows

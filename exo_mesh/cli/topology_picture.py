"""Draws the mesh in the terminal: peers with their memory, links, and the layers that each peer holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from exo_mesh.base.printable import counted
from exo_mesh.base.telemetry.tables import human_bytes
from exo_mesh.cli.tables import layers_text, peer_names
from exo_mesh.cli.verbs.models.facts import ago

BAR_CELLS = 24
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
_STATES = {"ready": "green", "loading": "yellow", "failed": "red"}


def picture(
    state: Mapping[str, Any], tokens_per_s: Mapping[str, float] | None = None, now: float | None = None
) -> RenderableType:
    """Draws `GET /state`. tokens_per_s: by instance, if two states were compared. now: Unix seconds, for ages."""
    names = peer_names(dict(state))
    peers = state["view"]["peers"]
    colour = {peer["id"]: COLOURS[index % len(COLOURS)] for index, peer in enumerate(peers)}
    parts: list[RenderableType] = [_peers(state, names, colour)]
    if state["links"]:
        parts.append(_links(state["links"], names, now))
    if state["cables"]:
        parts.append(_cables(state["cables"], names))
    drawn = tokens_by_instance(state)
    for instance in state["view"]["instances"]:
        speed = (tokens_per_s or {}).get(instance["id"])
        parts.append(_instance(instance, names, colour, drawn.get(instance["id"]), speed))
    if not state["view"]["instances"]:
        parts.append(
            Text("no model is loaded; the first request loads one, and `exo-mesh preview MODEL` plans one", style="dim")
        )
    return Group(*parts)


def tokens_by_instance(state: Mapping[str, Any]) -> dict[str, int]:
    """Tokens sampled so far by instance, as the drivers report."""
    drawn: dict[str, int] = {}
    for reading in state["telemetry"].values():
        for instance_id, count in reading["tokens"].items():
            drawn[instance_id] = max(count, drawn.get(instance_id, 0))
    return drawn


def _peers(state: Mapping[str, Any], names: Mapping[str, str], colour: Mapping[str, str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("peer", "engine", "memory", "", "load"):
        table.add_column(title, no_wrap=title != "")
    for peer in state["view"]["peers"]:
        reading = state["telemetry"].get(peer["id"])
        name = Text(names[peer["id"]], style=colour[peer["id"]])
        if peer["id"] == state["node_id"]:
            name.append(" (here)", style="dim")
        engine = next((device["engine"] for device in peer["devices"] if device["engine"]), "none")
        if reading is None:
            table.add_row(name, engine, Text("no reading yet", style="dim"), "", "")
            continue
        figures = f"{human_bytes(reading['usable_bytes'])} usable, {human_bytes(reading['reserved_bytes'])} reserved"
        table.add_row(name, engine, memory_bar(reading), figures, f"{reading['load']:.1f}")
    return table


def memory_bar(reading: Mapping[str, Any], cells: int = BAR_CELLS) -> Text:
    """Draws the whole memory as a bar: reserved by models (█), used by other programs (▒), usable for models (·)."""
    total = max(1, reading["total_bytes"], reading["reserved_bytes"] + reading["usable_bytes"])
    reserved = _cells(reading["reserved_bytes"], total, cells)
    usable = min(cells - reserved, _cells(reading["usable_bytes"], total, cells))
    others = cells - reserved - usable
    return Text.assemble(("█" * reserved, "green"), ("▒" * others, "dim"), ("·" * usable, ""))


def _cells(part: int, total: int, cells: int) -> int:
    """Cells of a part of the total, rounded; at least 1 if part > 0."""
    return min(cells, max(round(cells * part / total), 1 if part > 0 else 0))


def _links(links: Sequence[Mapping[str, Any]], names: Mapping[str, str], now: float | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("link", "", "round trip", "goodput (256 KiB probe)"):
        table.add_column(title, no_wrap=True)
    for link in links:
        ends = f"{names.get(link['from'], link['from'][:8])} ↔ {names.get(link['to'], link['to'][:8])}"
        rtt = link["rtt_ms"]
        table.add_row(
            ends,
            Text(link["address"], style="dim"),
            "?" if rtt is None else f"{rtt:.2f} ms",
            goodput_text(link, now),
        )
    return table


def goodput_text(link: Mapping[str, Any], now: float | None = None) -> str:
    """`88 MB/s, 3 min ago`: a short transfer on a busy machine says little, so its age belongs to it."""
    goodput, at = link.get("mb_per_s"), link.get("mb_per_s_at")  # a merge patch leaves out what is null
    if goodput is None:
        return "?"
    return f"{goodput:.0f} MB/s" + ("" if at is None or now is None else f", {ago(at, now)}")


def _cables(cables: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Table:
    """Draws the Thunderbolt cables between peers, with the state of RDMA."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("cable", "RDMA", "ports", "speed"):
        table.add_column(title, no_wrap=True)
    for cable in cables:
        table.add_row(
            " ↔ ".join(names.get(end["peer"], end["peer"][:8]) for end in cable["ends"]),
            Text("up", style="green") if cable["up"] else Text("down", style="red"),
            Text(" ↔ ".join(end["device"] or "no device" for end in cable["ends"]), style="dim"),
            cable["speed"],
        )
    return table


def _instance(
    instance: Mapping[str, Any],
    names: Mapping[str, str],
    colour: Mapping[str, str],
    tokens: int | None,
    tokens_per_s: float | None,
) -> RenderableType:
    owner = names.get(instance["owner"], instance["owner"][:8])
    head = Text.assemble(
        (instance["model"], "bold"),
        f"  instance {instance['id']}, ",
        (instance["state"], _STATES.get(instance["state"], "")),
        (f", ballot {instance['ballot'][0]} of {owner}", "dim"),
    )
    if tokens is not None:
        head.append(f", {counted(tokens, 'token')}")
    if tokens_per_s is not None:
        head.append(f", {tokens_per_s:.1f} tokens/s")
    stages = instance["stages"]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for stage in stages:
        style = colour.get(stage["peer"], "")
        table.add_row(
            Text(f"  {_stage_name(stage, names)}", style=style),
            layer_bar(stage["layers"], stages[-1]["layers"][1], style),
            f"layers {layers_text(stage['layers'])}",
            stage["engine"],
            human_bytes(stage["reserve_bytes"]),
        )
    why = [Text(f"  {instance['reason']}", style="dim")] if instance["reason"] else []
    return Group(head, table, *why, Text(""))


def _stage_name(stage: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """`studio`, or for a tensor group `studio + mini (jaccl)`."""
    group = stage.get("group")
    if not group:
        return names.get(stage["peer"], stage["peer"][:8])
    return f"{' + '.join(names.get(peer, peer[:8]) for peer in group['peers'])} ({group['backend']})"


def layer_bar(layers: Sequence[int], num_layers: int, style: str, cells: int = BAR_CELLS) -> Text:
    """Draws the half-open range `[start, stop)` among all layers as a bar."""
    first = min(cells - 1, cells * layers[0] // num_layers)
    last = max(first + 1, min(cells, cells * layers[1] // num_layers))
    return Text.assemble(("─" * first, "dim"), ("█" * (last - first), style), ("─" * (cells - last), "dim"))

"""Plain text for people: aligned columns, sizes, and the lines that say which peer holds which layers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from exo_mesh.telemetry.printable import escaped_json, printable


def columns(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with left-aligned columns and every cell printable; only the header if there are no rows."""
    table = [list(header), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(line.rstrip() for line in lines)


def human_bytes(num_bytes: float) -> str:
    """`12.3 GB`, decimal as memory and disks are sold and as --max-memory takes it."""
    for unit in ("B", "KB", "MB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def print_json(value: Any) -> None:
    """As every verb with --json does it."""
    print(escaped_json(json.dumps(value, indent=2, ensure_ascii=False)))


def peer_names(state: dict[str, Any]) -> dict[str, str]:
    """Name by peer id; the first letters of the id are added where two peers share a name."""
    peers = state["view"]["peers"]
    names = [printable(peer["name"]) for peer in peers]
    return {
        peer["id"]: name if names.count(name) == 1 else f"{name} ({peer['id'][:6]})"
        for peer, name in zip(peers, names, strict=True)
    }


def ring_line(instance: dict[str, Any], names: dict[str, str]) -> str:
    """`alpha 0-5 → beta 6-11`: the peers of an instance in ring order with the layers that each holds."""
    stages = ((names.get(stage["peer"], stage["peer"][:8]), stage["layers"]) for stage in instance["stages"])
    return " → ".join(f"{name} {layers_text(layers)}" for name, layers in stages)


def layers_text(layers: Sequence[int]) -> str:
    """`0-5` for the half-open range [0, 6)."""
    start, stop = layers
    return f"{start}-{stop - 1}" if stop - start > 1 else str(start)

"""Prints nodes side by side from the output of `exo-mesh status --json` at each; scripts/cluster_info.sh calls it.

python3 side_by_side.py FILE...          a column for each file
python3 side_by_side.py --urls FILE      the API addresses of all peers that this one node knows, one per line

It uses the standard library only and works with Python 3.9 or newer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def column(state: dict[str, Any]) -> dict[str, str]:
    """Returns what one node reports about itself and the mesh, by row."""
    own_id = state["node_id"]
    peers = {peer["id"]: peer for peer in state["view"]["peers"]}
    own = peers.get(own_id, {})
    reading = state["telemetry"].get(own_id, {})
    devices = own.get("devices", [])
    return {
        "node": own.get("name", own_id[:8]),
        "version": own.get("version", "?"),
        "health": state["health"]["status"],
        "reasons": "; ".join(reason["message"] for reason in state["health"].get("reasons", ())) or "-",
        "engine": ", ".join(device["engine"] or "none" for device in devices) or "-",
        "device": ", ".join(str(device.get("kind", "?")) for device in devices) or "-",
        "memory": _gb(reading.get("total_bytes")),
        "usable": _gb(reading.get("usable_bytes")),
        "reserved": _gb(reading.get("reserved_bytes")),
        "load": str(reading.get("load", "?")),
        "temperature": f"{reading['temperature_c']} C" if reading.get("temperature_c") else "-",
        "power": f"{reading['power_w']} W" if reading.get("power_w") else "-",
        "rdma up": ", ".join(port["device"] for port in own.get("rdma_ports", ()) if port["active"]) or "-",
        "peers": ", ".join(sorted(peer["name"] for peer in peers.values() if peer["id"] != own_id)) or "none",
        "view": state["view"]["view_digest"][:12],
        "models": ", ".join(f"{one['model']} ({one['state']})" for one in state["view"]["instances"]) or "-",
    }


def _gb(num_bytes: float | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 1e9:.1f} GB"


def table(columns: Sequence[dict[str, str]]) -> str:
    """Formats a row for each property and a column for each node; cells are cut after 40 characters."""
    rows = [[name, *(_cut(one[name]) for one in columns)] for name in columns[0]]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cut(text: str) -> str:
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable if len(printable) <= 40 else f"{printable[:39]}…"


def main(argv: Sequence[str]) -> int:
    """Returns exit code 1 if the nodes disagree about the mesh."""
    if argv[0] == "--urls":
        state = json.loads(Path(argv[1]).read_text())
        print("\n".join(peer["api_url"] for peer in state["view"]["peers"] if peer["api_url"]))
        return 0
    columns = [column(json.loads(Path(file).read_text())) for file in argv]
    print(table(columns))
    differences = (("version", "run different versions: scripts/sync_nodes.sh"), ("view", "see different meshes"))
    for row, meaning in differences:
        if len({one[row] for one in columns}) > 1:
            print(f"\nthe nodes {meaning}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

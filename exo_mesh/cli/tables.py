"""Texts that several verbs print: JSON, names of peers, and which peer holds which layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from exo_mesh.printable import escaped_json, printable


def print_json(value: Any) -> None:
    """Prints a value as indented JSON with control characters escaped."""
    print(escaped_json(json.dumps(value, indent=2, ensure_ascii=False)))


def peer_names(state: dict[str, Any]) -> dict[str, str]:
    """Names by peer id; peers that share a name get the first letters of their ids added."""
    peers = state["view"]["peers"]
    names = [printable(peer["name"]) for peer in peers]
    return {
        peer["id"]: name if names.count(name) == 1 else f"{name} ({peer['id'][:6]})"
        for peer, name in zip(peers, names, strict=True)
    }


def ring_line(instance: dict[str, Any], names: dict[str, str]) -> str:
    """`alpha 0-5 → beta 6-11`: the peers of an instance in ring order, each with its layers.

    While the instance loads, each with its progress, too: `alpha 0-5 (loading 3/8) → beta 6-11 (ready)`.
    """
    parts = []
    for stage in instance["stages"]:
        part = f"{names.get(stage['peer'], stage['peer'][:8])} {layers_text(stage['layers'])}"
        progress = stage.get("progress") if instance.get("state") == "loading" else ""
        parts.append(f"{part} ({progress})" if progress else part)
    return " → ".join(parts)


def layers_text(layers: Sequence[int]) -> str:
    """`0-5` for the half-open range [0, 6)."""
    start, stop = layers
    return f"{start}-{stop - 1}" if stop - start > 1 else str(start)

"""Describes every installed engine as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exo_mesh.engine.registry import load_registry
from exo_mesh.errors import MeshError


def describe_engines(engine: str = "auto", options: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Every installed engine, by name. `chosen` marks the engine that `--engine auto` takes. engine, options: settings
    of a node."""
    registry = load_registry().configured(engine, options or {})
    try:
        chosen = registry.choose().name
    except MeshError:
        chosen = ""  # no engine can run here: each row has its reason
    found: list[dict[str, Any]] = []
    for name, provider in sorted(registry.providers.items()):
        look = provider.availability()
        found.append(
            {
                "name": name,
                "kind": provider.kind,
                "compute": look.compute if look.available else "",
                "version": provider.version(),
                "available": look.available,
                "reason": look.reason,
                "remedy": look.remedy,
                "chosen": name == chosen,
            }
        )
    for name, why in sorted(registry.broken.items()):
        found.append(
            {
                "name": name,
                "kind": "",
                "compute": "",
                "version": "",
                "available": False,
                "reason": f"does not import: {why}",
                "remedy": "",
                "chosen": False,
            }
        )
    return found

"""List the engines installed on this machine, which one `--engine auto` chooses, why the others cannot run and what
would help; and the devices that they compute on, with how much memory models may take and why."""

from __future__ import annotations

import argparse
from typing import Any

from exo_mesh.cli import exit_codes
from exo_mesh.cli.tables import columns, human_bytes, print_json
from exo_mesh.errors import MeshError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Look at the engines of this Python environment; asks no node."""
    found = add_devices(describe_engines())
    if args.json:
        print_json(found)
        return exit_codes.OK
    rows = [
        [
            ("* " if engine["chosen"] else "  ") + engine["name"],
            engine["kind"],
            engine["compute"] or "-",
            engine["version"] or "-",
            "yes" if engine["available"] else "no",
            "; ".join(text for text in (engine["reason"], engine["remedy"]) if text),
        ]
        for engine in found
    ]
    print(columns(("  ENGINE", "KIND", "COMPUTE", "VERSION", "RUNS HERE", "WHY"), rows))
    devices = {(device["kind"], device["name"]): device for engine in found if (device := engine["device"])}
    rows = [
        [device["name"], kind, human_bytes(device["total_bytes"]), human_bytes(device["usable_bytes"]), device["why"]]
        for (kind, _), device in devices.items()
    ]
    print("\n" + columns(("DEVICE", "KIND", "MEMORY", "USABLE", "WHY"), rows))
    return exit_codes.OK


def describe_engines() -> list[dict[str, Any]]:
    """Every engine installed here, by name. `chosen` marks what `--engine auto` takes."""
    from exo_mesh.engine.registry import load_registry

    registry = load_registry()
    try:
        chosen = registry.choose().name
    except MeshError:
        chosen = ""  # none can run here: each row says why
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


def add_devices(engines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with `device` in each: what it computes on here; None for one that cannot run.

    usable_bytes is what a node without --max-memory and without loaded models would offer the mesh now.
    """
    from exo_mesh.machine.accelerator_readings import read_machine
    from exo_mesh.machine.accelerators import accelerator_for
    from exo_mesh.machine.memory import read_memory, usable_bytes

    machine, system = read_machine(), read_memory()
    for engine in engines:
        engine["device"] = None
        if engine["available"]:
            device = accelerator_for(engine["compute"], machine, system)
            engine["device"] = {
                "kind": device.kind,
                "name": device.name,
                "total_bytes": device.memory.total_bytes,
                "usable_bytes": usable_bytes(device.memory, None, 0, 0),
                "why": device.memory.why,
            }
    return engines

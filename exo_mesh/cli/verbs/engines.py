"""List the engines installed on this machine and the devices that they use.

A star marks the engine that `--engine auto` chooses. An engine that cannot run is shown with the reason and a remedy, a
device with the memory that models may use, and why.
"""

from __future__ import annotations

import argparse
from typing import Any

from exo_mesh.base.telemetry.tables import human_bytes
from exo_mesh.cli import exit_codes
from exo_mesh.cli.tables import print_json, say_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Lists the engines of this Python environment; needs no node."""
    from exo_mesh.engine.listing import describe_engines

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
    say_table(("  ENGINE", "KIND", "COMPUTE", "VERSION", "RUNS HERE", "WHY"), rows)
    devices = {(device["kind"], device["name"]): device for engine in found if (device := engine["device"])}
    rows = [
        [device["name"], kind, human_bytes(device["total_bytes"]), human_bytes(device["usable_bytes"]), device["why"]]
        for (kind, _), device in devices.items()
    ]
    print()
    say_table(("DEVICE", "KIND", "MEMORY", "USABLE", "WHY"), rows)
    return exit_codes.OK


def add_devices(engines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sets `device` in each engine to the device that it computes on here, or None if it cannot run; returns the same
    list.

    usable_bytes: what a node without --max-memory and without loaded models would offer the mesh now.
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

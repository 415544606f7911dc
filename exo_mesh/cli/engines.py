"""List the engines installed on this machine, which one `--engine auto` chooses, and why the others cannot run."""

from __future__ import annotations

import argparse

from exo_mesh.cli import exit_codes
from exo_mesh.cli.tables import columns, print_json
from exo_mesh.errors import MeshError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Look at the engines of this Python environment; asks no node."""
    found = describe_engines()
    if args.json:
        print_json(found)
        return exit_codes.OK
    rows = [
        [
            ("* " if engine["chosen"] else "  ") + str(engine["name"]),
            engine["kind"],
            engine["version"] or "-",
            "yes" if engine["available"] else "no",
            "; ".join(text for text in (str(engine["reason"]), str(engine["remedy"])) if text),
        ]
        for engine in found
    ]
    print(columns(("  ENGINE", "KIND", "VERSION", "RUNS HERE", "WHY"), rows))
    return exit_codes.OK


def describe_engines() -> list[dict[str, object]]:
    """Every engine installed here, by name. `chosen` marks what `--engine auto` takes."""
    from exo_mesh.engine.registry import load_registry

    registry = load_registry()
    try:
        chosen = registry.choose().name
    except MeshError:
        chosen = ""  # none can run here: each row says why
    found: list[dict[str, object]] = []
    for name, provider in sorted(registry.providers.items()):
        look = provider.availability()
        found.append(
            {
                "name": name,
                "kind": provider.kind,
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
                "version": "",
                "available": False,
                "reason": f"does not import: {why}",
                "remedy": "",
                "chosen": False,
            }
        )
    return found

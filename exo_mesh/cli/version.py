"""Print the versions of the package, the protocol and the libraries that matter."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from exo_mesh import PROTOCOL_VERSION, __version__
from exo_mesh.cli import exit_codes
from exo_mesh.cli.tables import print_json

_LIBRARIES = ("grpcio", "protobuf", "numpy", "mlx", "mlx-lm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Read the installed metadata; imports none of the libraries."""
    versions = library_versions()
    if args.json:
        print_json({"exo-mesh": __version__, "protocol": PROTOCOL_VERSION, **versions})
        return exit_codes.OK
    print(f"exo-mesh {__version__} (protocol {PROTOCOL_VERSION})")
    print(", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items()))
    return exit_codes.OK


def library_versions(names: Sequence[str] = _LIBRARIES) -> dict[str, str | None]:
    """Installed version by library; None where it is absent."""
    from importlib import metadata

    versions: dict[str, str | None] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions

"""Print the versions of the package, the protocol and the main libraries."""

from __future__ import annotations

import argparse

from exo_mesh import PROTOCOL_VERSION, __version__
from exo_mesh.base.versions import library_versions
from exo_mesh.cli import exit_codes
from exo_mesh.cli.tables import print_json

_LIBRARIES = ("grpcio", "protobuf", "numpy", "mlx", "mlx-lm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints versions from the installed metadata, without importing the libraries."""
    versions = library_versions(_LIBRARIES)
    if args.json:
        print_json({"exo-mesh": __version__, "protocol": PROTOCOL_VERSION, **versions})
        return exit_codes.OK
    print(f"exo-mesh {__version__} (protocol {PROTOCOL_VERSION})")
    print(", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items()))
    return exit_codes.OK

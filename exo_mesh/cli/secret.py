"""Make a secret: `secret new` prints one, `secret new --out FILE` writes it to a file that only you can read.

Give the same file to every peer: `exo-mesh --secret-file FILE`. Without a secret a mesh is open.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from exo_mesh.cli import exit_codes
from exo_mesh.security.secret import new_secret, write_new
from exo_mesh.settings.config import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `new` and `--out`."""
    parser.add_argument("what", choices=("new",), help="make a new secret")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it here (mode 0600); never overwrites")


def run(args: argparse.Namespace) -> int:
    """Print or write a new secret."""
    secret = new_secret()
    if args.out is None:
        print(secret)
        return exit_codes.OK
    try:
        write_new(args.out, secret)
    except FileExistsError as exc:
        raise ConfigError(f"--out {args.out}: the file exists; a secret is never overwritten") from exc
    except OSError as exc:
        raise ConfigError(f"--out {args.out}: {exc.strerror or exc}") from exc
    print(f"wrote {args.out}; start every peer with --secret-file {args.out}", file=sys.stderr)
    return exit_codes.OK

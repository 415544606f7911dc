"""Make a mesh secret: `secret new` prints it, `secret new --out FILE` writes it to a file that only you can read.

Copy the file to every machine and start each node with `exo-mesh --secret-file FILE`. Without a secret a mesh is open.
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
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the secret to this file (mode 0600); never overwrites"
    )


def run(args: argparse.Namespace) -> int:
    """Prints or writes a new secret."""
    secret = new_secret()
    if args.out is None:
        print(secret)
        return exit_codes.OK
    try:
        write_new(args.out, secret)
    except FileExistsError as exc:
        raise ConfigError(
            f"--out {args.out}: the file exists, and a secret is never overwritten; name another file"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"--out {args.out}: {exc.strerror or exc}") from exc
    print(f"wrote {args.out}; copy it to every machine and start each node with --secret-file FILE", file=sys.stderr)
    return exit_codes.OK

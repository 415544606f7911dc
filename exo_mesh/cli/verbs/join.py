"""Join a mesh that has a secret: `join CODE`, with the code that `exo-mesh invite` prints on a machine of the mesh.

The secret is stored in the node's home, readable only by you; from then on `exo-mesh` uses it. The code works once. The
connection to the other machine need not be private: each side proves to the other that it knows the code.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import base_url
from exo_mesh.cli.tables import say
from exo_mesh.security.joiner import fetch
from exo_mesh.security.joining import parse_password
from exo_mesh.security.secret import write_new
from exo_mesh.settings.config import SECRET_FILE_NAME, ConfigError, Settings
from exo_mesh.settings.loading import load_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds CODE, `--peer`, `--out`, `--home`."""
    parser.add_argument(
        "code", metavar="CODE", help="the code that `exo-mesh invite` printed: HOST:PORT/abcd-efgh-jkmn"
    )
    parser.add_argument(
        "--peer", metavar="HOST:PORT", help="API of the inviting node, instead of the address in the code"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="store the secret in this file instead of the home")
    parser.add_argument("--home", action="append", metavar="DIR", help="the home of the node, as in `exo-mesh --home`")


def run(args: argparse.Namespace) -> int:
    """Fetches the secret, stores it, and prints the next step."""
    settings = load_settings({"home": args.home} if args.home else {}, os.environ).settings
    address, _, password = args.code.strip().rpartition("/")
    address = args.peer or address
    parse_password(password)
    if not address:
        raise ConfigError("the code has no address: name the API of the inviting node with --peer HOST:PORT")
    target = _target(settings, args.out)
    gift = fetch(base_url(address), password, settings.name)
    write_new(target, gift.secret)
    start = "exo-mesh" if args.out is None else f"exo-mesh --secret-file {shlex.quote(str(target))}"
    start += f" --home {shlex.quote(args.home[-1])}" if args.home else ""
    start += "" if gift.namespace == settings.namespace else f" --namespace {shlex.quote(gift.namespace)}"
    say(f"joined the mesh of {gift.node}: its secret is in {target}")
    print(
        f"start `{start}`, or restart a node that runs here already. If the node finds no peer, add "
        f"--bootstrap-peers {gift.peer}",
        file=sys.stderr,
    )
    return exit_codes.OK


def _target(settings: Settings, out: Path | None) -> Path:
    """The file for the secret. Checked before the code is used, because it works only once. Raises ConfigError."""
    if out is None and settings.secret:
        where = settings.secret_file or "EXO_MESH_SECRET"
        raise ConfigError(f"this machine has a secret already ({where}); remove it, or name another file with --out")
    target = out or settings.home / SECRET_FILE_NAME
    if out is None:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if target.exists():
        raise ConfigError(f"{target} exists, and a secret is never overwritten; name another file with --out")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"the directory {target.parent} is not writable; name another file with --out")
    return target

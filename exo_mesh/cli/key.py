"""Keys of the HTTP API: `key new --role use|admin` prints one, once; `key list`; `key remove ID`; `key local`.

`use` may chat and read, `admin` may also load and stop models. A running node notices the change by itself. In a mesh
with a secret the keys of all nodes are valid at every node, and a removed one at none.
`key local` prints the local token of the home, whose holder may do what an admin may.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys

from exo_mesh.cli import exit_codes
from exo_mesh.cli.tables import print_json
from exo_mesh.errors import InputError
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role
from exo_mesh.security.local_token import read_token
from exo_mesh.settings.config import ConfigError, load_settings
from exo_mesh.telemetry.tables import columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, with which role or id, and whose keys."""
    parser.add_argument("what", choices=("new", "list", "remove", "local"), help="what to do")
    parser.add_argument("id", nargs="?", metavar="ID", help="the key to remove, by its id in `key list`")
    parser.add_argument("--role", choices=[str(role) for role in Role], help="what a new key is good for (use)")
    parser.add_argument("--home", action="append", metavar="DIR", help="the home of the node, as in `exo-mesh --home`")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Change or list the keys in the node's home."""
    settings = load_settings({"home": args.home} if args.home else {}, os.environ).settings
    file = KeyFile(settings.home / FILE_NAME)
    if (args.what == "remove") != bool(args.id):
        raise ConfigError("key remove needs the ID of a key; the others take none")
    return {"new": _new, "list": _list, "remove": _remove, "local": _local}[args.what](file, args)


def _new(file: KeyFile, args: argparse.Namespace) -> int:
    try:
        text, key = file.add(Role(args.role or Role.USE), datetime.datetime.now(datetime.UTC))
    except InputError as exc:
        raise ConfigError(str(exc)) from exc
    print_json({"id": key.id, "role": key.role, "key": text}) if args.json else print(text)
    print(f"a key with the role {key.role}; it is shown only now, {file.path} has a hash of it", file=sys.stderr)
    return exit_codes.OK


def _local(file: KeyFile, args: argparse.Namespace) -> int:
    token = read_token(file.path.parent)
    if not token:
        raise InputError(f"{file.path.parent} has no local token that you may read; a node makes it when it starts")
    print_json({"token": token}) if args.json else print(token)
    return exit_codes.OK


def _list(file: KeyFile, args: argparse.Namespace) -> int:
    rows = [{"id": key.id, "role": str(key.role), "created": key.created} for key in file.read()]
    if args.json:
        print_json(rows)
    else:
        print(columns(["ID", "ROLE", "CREATED"], [list(row.values()) for row in rows]))
    return exit_codes.OK


def _remove(file: KeyFile, args: argparse.Namespace) -> int:
    if not file.remove(args.id, datetime.datetime.now(datetime.UTC)):
        raise ConfigError(f"no key {args.id}; see exo-mesh key list")
    return exit_codes.OK

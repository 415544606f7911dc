"""Manage keys of the HTTP API: `key new [NAME] --role use|admin`, `key list`, `key remove ID`, `key local`.

A new key is printed once; its name tells people whose it is. The role `use` may chat and read, `admin` may also load
and stop models. A running node notices changes by itself. In a mesh with a secret every node accepts the keys of all
nodes, and none a removed key.
`key local` prints the local token of the home, which has the rights of an admin. Without --home, the home is that of
the node that other commands call, or the default one if no node of this user runs.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys

from exo_mesh.base.printable import quoted
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import print_json, say_table
from exo_mesh.errors import InputError
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role
from exo_mesh.security.local_token import read_token
from exo_mesh.security.sessions import number_of
from exo_mesh.settings.config import ConfigError
from exo_mesh.settings.loading import load_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the action, the id or role of the key, `--home`, `--api-url` and `--json`."""
    parser.add_argument("what", choices=("new", "list", "remove", "local"), help="the action")
    parser.add_argument(
        "id",
        nargs="?",
        metavar="NAME or ID",
        help="for new: a name for people; for remove: id of the key, as in `key list`, or of a session",
    )
    parser.add_argument("--role", choices=[str(role) for role in Role], help="rights of a new key (use)")
    parser.add_argument("--home", action="append", metavar="DIR", help="the home of the node, as in `exo-mesh --home`")
    add_api_flags(parser, home=False)


def run(args: argparse.Namespace) -> int:
    """Changes or lists the keys in the node's home."""
    home = _home(args)
    settings = load_settings({"home": home} if home else {}, os.environ).settings
    file = KeyFile(settings.home / FILE_NAME)
    if args.what == "remove" and not args.id:
        raise ConfigError("key remove needs the ID of a key or a session; see exo-mesh key list")
    if args.what not in ("new", "remove") and args.id:
        raise ConfigError(f"key {args.what} takes no name or id: {quoted(args.id)} is too much")
    if args.what == "remove" and number_of(args.id) and not settings.secret:
        raise ConfigError(f"key remove {args.id}: a mesh without a secret has no sessions; see exo-mesh key list")
    return {"new": _new, "list": _list, "remove": _remove, "local": _local}[args.what](file, args)


def _home(args: argparse.Namespace) -> list[str]:
    """The home that --home names, or the home of the node that the command means; [] for the default home."""
    if args.home or (os.environ.get("EXO_MESH_HOME") and not args.api_url):
        return list(args.home or ())
    client = ApiClient(args.api_url)
    node = client.own_node()
    if node is None and args.api_url:
        raise ConfigError(f"no node of this user serves {client.url}: run this on its machine, or name --home DIR")
    return [str(node.home)] if node else []


def _new(file: KeyFile, args: argparse.Namespace) -> int:
    try:
        text, key = file.add(Role(args.role or Role.USE), datetime.datetime.now(datetime.UTC), args.id or "")
    except InputError as exc:
        raise ConfigError(str(exc)) from exc
    print_json({"id": key.id, "name": key.name, "role": key.role, "key": text}) if args.json else print(text)
    print(f"new key with the role {key.role}, shown only this once; {file.path} stores its hash", file=sys.stderr)
    return exit_codes.OK


def _local(file: KeyFile, args: argparse.Namespace) -> int:
    token = read_token(file.path.parent)
    if not token:
        raise InputError(
            f"no readable local token in {file.path.parent}; a node writes it at its start, for its own user"
        )
    print_json({"token": token}) if args.json else print(token)
    return exit_codes.OK


def _list(file: KeyFile, args: argparse.Namespace) -> int:
    rows = [{"id": key.id, "name": key.name, "role": str(key.role), "created": key.created} for key in file.read()]
    if args.json:
        print_json(rows)
    else:
        say_table(["ID", "NAME", "ROLE", "CREATED"], [list(row.values()) for row in rows])
    return exit_codes.OK


def _remove(file: KeyFile, args: argparse.Namespace) -> int:
    now = datetime.datetime.now(datetime.UTC)
    number = number_of(args.id)
    if number:
        file.refuse(number, now)
    elif not file.remove(args.id, now):
        raise ConfigError(f"no key {args.id}; see exo-mesh key list")
    print(f"revoked the {'session' if number else 'key'} {args.id}", file=sys.stderr)
    return exit_codes.OK

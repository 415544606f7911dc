"""List, remove and pin the files of the prefix cache on this machine: `cache ls`, `cache rm KEY`, `cache pin KEY`.

`--prefix-disk DIR` makes a node write them. KEY is a key of the list or its beginning; a part of the name of a model's
directory stands for all files of that model. A pinned file does not expire, and does not give way to others. A running
node notices removed files when it looks for them, and computes the prompt instead.
"""

from __future__ import annotations

import argparse
import datetime
import os
from pathlib import Path

from exo_mesh.base.printable import counted
from exo_mesh.cli import exit_codes
from exo_mesh.cli.tables import fitted, line_width, print_json
from exo_mesh.errors import InputError
from exo_mesh.rings.prefix_disk.folder import StoredFile, stored_files
from exo_mesh.settings.config import ConfigError
from exo_mesh.settings.loading import load_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the action, its argument, `--all`, `--prefix-disk`, `--home` and `--json`."""
    parser.add_argument("what", choices=("ls", "rm", "pin", "unpin"), help="the action")
    parser.add_argument("which", nargs="?", metavar="KEY|MODEL", help="for rm, pin and unpin: which files")
    parser.add_argument("--all", action="store_true", help="for rm: all files")
    parser.add_argument("--prefix-disk", metavar="DIR", help="the directory; by default the one in the node's settings")
    parser.add_argument("--home", action="append", metavar="DIR", help="the home of the node, as in `exo-mesh --home`")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Lists or changes the files below the directory of the settings."""
    if (args.what == "ls") != (not args.which and not args.all) or (args.all and (args.what != "rm" or args.which)):
        raise ConfigError("cache ls takes nothing else; rm needs KEY, MODEL or --all; pin and unpin need KEY or MODEL")
    flags = {"home": args.home} if args.home else {}
    if args.prefix_disk:
        flags["prefix_disk"] = [args.prefix_disk]
    root = load_settings(flags, os.environ).settings.prefix_disk
    if root is None:
        raise InputError("no directory is set: give --prefix-disk DIR, here or in the settings of the node")
    files = sorted(stored_files(root), key=lambda one: one.used_at, reverse=True)
    if args.what == "ls":
        print_json([_as_json(one) for one in files]) if args.json else print(describe(files, root))
        return exit_codes.OK
    found = files if args.all else [one for one in files if _is_meant(one, args.which)]
    if not found and not args.all:
        raise InputError(f"no file below {root} has the key or model {args.which}; see `exo-mesh cache ls`")
    for one in found:
        _change(one, args.what)
    done = {"rm": "removed", "pin": "pinned", "unpin": "unpinned"}[args.what]
    keys = [one.key for one in found]
    print_json({done: keys}) if args.json else print(f"{done} {len(keys)} of {counted(len(files), 'file')}")
    return exit_codes.OK


def describe(files: list[StoredFile], root: Path) -> str:
    """The files as a table, the last used ones first."""
    if not files:
        return f"no prompts are on disk below {root}"
    rows = []
    for one in files:
        used = datetime.datetime.fromtimestamp(one.used_at).astimezone()
        size = f"{one.num_bytes / 1e6:.1f}"
        pinned = "pinned" if one.pinned else ""
        rows.append((one.key[:12], str(one.tokens), size, f"{used:%Y-%m-%d %H:%M}", pinned, one.stage))
    total = sum(one.num_bytes for one in files)
    table = fitted(["KEY", "TOKENS", "MB", "LAST USED", "PINNED", "STAGE"], rows, line_width())
    return f"{table}\n{counted(len(files), 'file')}, {total / 1e6:.1f} MB, below {root}"


def _as_json(one: StoredFile) -> dict[str, object]:
    return {
        "key": one.key,
        "tokens": one.tokens,
        "bytes": one.num_bytes,
        "last_used": one.used_at,
        "pinned": one.pinned,
        "stage": one.stage,
    }


def _is_meant(one: StoredFile, which: str) -> bool:
    return one.key.startswith(which.lower()) or which in one.stage.split("/")[0]


def _change(one: StoredFile, what: str) -> None:
    try:
        if what == "rm":
            one.remove()
        elif what == "pin":
            one.pin.touch(mode=0o600)
        else:
            one.pin.unlink(missing_ok=True)
    except OSError as exc:
        raise InputError(f"{one.path} cannot be changed: {exc.strerror or exc}") from exc

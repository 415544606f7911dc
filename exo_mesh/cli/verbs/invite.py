"""Invite another machine into a mesh with a secret: prints a code that works once, within ten minutes.

On the other machine, `exo-mesh join CODE` fetches the secret and stores it; from then on `exo-mesh` starts a member.
Run this on a machine of the mesh, as the user of its node, because it needs the local token. It waits until the other
machine has joined; Ctrl-C withdraws the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import print_json
from exo_mesh.errors import MeshError

_POLL_S = 0.5

_ENDINGS = {
    "expired": "the invitation has expired: no machine joined within 10 minutes",
    "wrong_codes": "the invitation has ended: five wrong codes were tried",
    "withdrawn": "the invitation was withdrawn: a newer one replaced it",
    "none": "the invitation is gone: the node was restarted",
}


class LocalClient(ApiClient):
    """A client that sends the local token even if EXO_MESH_API_KEY is set: invitations accept a key on private
    connections only."""

    prefers_token = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--no-wait`, `--api-url`, `--home`, `--json`."""
    parser.add_argument("--no-wait", action="store_true", help="print the code and exit; the code stays valid")
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Requests a code from the node, shows it, and waits until it is used or ends."""
    client = LocalClient(args.api_url, args.home)
    made = client.post("/v1/invite", {})
    if args.json:
        print_json(made)
        return exit_codes.OK
    try:
        _show(made)
        return exit_codes.OK if args.no_wait else _wait(client)
    except KeyboardInterrupt:
        client.delete("/v1/invite")
        print("the invitation was withdrawn")
        raise


def _show(made: dict[str, Any]) -> None:
    first, *others = made["codes"]
    print(f"On the other machine, within {made['left_s'] / 60:.0f} minutes:\n\n    exo-mesh join {first}\n", flush=True)
    draws = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and sys.stdout.encoding.lower() == "utf-8"
    if draws and (picture := qr_text(made.get("qr", ()), shutil.get_terminal_size().columns)):
        print(f"{picture}\n", flush=True)
    if others:
        addresses = ", ".join(code.rpartition("/")[0] for code in others)
        print(f"If it cannot reach that address, add --peer with one of: {addresses}\n", flush=True)


def qr_text(rows: Sequence[str], columns: int) -> str:
    """A QR code of the command, two rows of modules in a line, dark on light whatever the colours of the terminal are.
    rows: `1` is a dark module. "" if it does not fit into the columns, or there is none."""
    margin = 4
    width = len(rows) + 2 * margin
    if not rows or width > columns:
        return ""
    blank = ["0" * width] * margin
    padded = [*blank, *(f"{'0' * margin}{row}{'0' * margin}" for row in rows), *blank]
    padded += ["0" * width] * (len(padded) % 2)
    halves = {"00": " ", "10": "▀", "01": "▄", "11": "█"}
    lines = (
        "".join(halves[upper + lower] for upper, lower in zip(*pair, strict=True))
        for pair in zip(padded[::2], padded[1::2], strict=True)
    )
    return "\n".join(f"\x1b[30;107m{line}\x1b[0m" for line in lines)


def _wait(client: ApiClient) -> int:
    """Waits until the invitation has ended. Raises MeshError if no machine joined."""
    tries_left = None
    while True:
        now: dict[str, Any] = client.get("/v1/invite")
        if now["state"] == "joined":
            print(f"{now['joined']} has joined: it now has the secret of this mesh")
            return exit_codes.OK
        if now["state"] != "open":
            raise MeshError(_ENDINGS.get(now["state"], "the invitation is over"))
        if tries_left not in (None, now["tries_left"]):
            print(f"a wrong code was tried; {now['tries_left']} tries are left", flush=True)
        tries_left = now["tries_left"]
        time.sleep(_POLL_S)

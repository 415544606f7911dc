"""Print names for the completion scripts of shells, one per line: models, instances (for `stop`) or peers.

Only the scripts use this verb, so `exo-mesh --help` does not list it. It prints nothing if no node answers in time.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable, Iterator

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.errors import MeshError

KINDS = ("models", "instances", "peers")
DEADLINE_S = 0.7
"""A user who pressed Tab waits for the answer."""
MAX_NAMES = 200
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,199}")
"""Names without characters that a shell could expand: peers choose their own names, so others are not printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds KIND, PREFIX, LINE."""
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("prefix", metavar="PREFIX", help="the begin of the names")
    parser.add_argument(
        "line",
        metavar="LINE",
        nargs="?",
        default="",
        help="the command line; names come from the node of its --api-url",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the names that the node of the command line knows."""
    words = _words(args.line)
    try:
        client = ApiClient(_value(words, "--api-url"), _value(words, "--home"))
        names = sorted(set(_names(client, args.kind)))
    except MeshError:
        return exit_codes.OK
    found = [name for name in names if name.startswith(args.prefix) and _SAFE.fullmatch(name)]
    print("".join(f"{name}\n" for name in found[:MAX_NAMES]), end="")
    return exit_codes.OK


def _names(client: ApiClient, kind: str) -> Iterator[str]:
    if kind == "models":
        for entry in client.get("/v1/models", DEADLINE_S)["data"]:
            yield from (entry["id"], *entry["aliases"])
        return
    view = client.get("/state", DEADLINE_S)["view"]
    if kind == "peers":
        yield from (peer["name"] for peer in view["peers"])
    else:
        for instance in view["instances"]:
            yield from (instance["id"], instance["model"])


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # an unclosed quote: the user is still typing
        return line.split()


def _value(words: Iterable[str], flag: str) -> str | None:
    """The value of `--flag X` or `--flag=X`, the last one if repeated; None if it is not given."""
    found = None
    before = ""
    for word in words:
        if before == flag:
            found = word
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
        before = word
    return found

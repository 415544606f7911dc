"""Let a node finish its requests and accept no new ones, so that stopping it ends no request.

New requests to the node get a 503, /readyz reports not ready (nginx then uses other peers), and new placements leave
the node out. If requests of other peers keep using its layers, the mesh places their model on other peers too, if these
can hold it. Layers that stay serve requests of other peers until the node stops: such a request then pauses until other
peers have loaded these layers, and continues.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

from exo_mesh.base.printable import counted, printable
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags, seconds
from exo_mesh.cli.tables import layers_text, say

_POLL_S = 0.2
_THEN = "answers that use it then pause until other peers have loaded these layers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--wait`, `--undo`, `--api-url`."""
    parser.add_argument("--wait", type=seconds, default=300.0, metavar="SECONDS", help="how long to wait (300)")
    parser.add_argument("--undo", action="store_true", help="accept requests again")
    add_api_flags(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """Calls `POST /drain` and waits until nothing runs; exit code 1 if something still runs after --wait."""
    client = ApiClient(args.api_url, args.home)
    if args.undo:
        client.delete("/drain")
        say("the node accepts requests again")
        return exit_codes.OK
    drain = client.post("/drain", {})
    end = time.monotonic() + args.wait
    if not drain["drained"]:
        print(f"waiting for {_left(drain)}, for up to {args.wait:g} s", file=sys.stderr)
    while not drain["drained"] and time.monotonic() < end:
        time.sleep(_POLL_S)
        drain = client.get("/drain")
    if drain["drained"]:
        say("drained: the node can be stopped")
    else:
        say(f"not drained: {_left(drain)} still run; if the node stops now, requests of other peers pause and continue")
    for line in staying(client.get("/state")):
        say(line)
    return exit_codes.OK if drain["drained"] else exit_codes.FAILED


def _left(drain: Mapping[str, Any]) -> str:
    """What has to end before the node is drained."""
    sequences = counted(drain["sequences"], "sequence")
    return f"{counted(drain['requests'], 'request')} to this node and {sequences} on its stages"


def staying(state: Mapping[str, Any]) -> list[str]:
    """One line for each range of layers that the node holds, and what happens to it when the node stops."""
    own, lines = state.get("node_id"), []
    has_others = any(peer["id"] != own for peer in state["view"]["peers"])
    instances = state["view"]["instances"]
    held = [(one, [stage for stage in one.get("stages", ()) if own in _peers(stage)]) for one in instances]
    elsewhere = {one["model"] for one, here in held if not here and one.get("state") == "ready"}
    for instance, here in held:
        for stage in here:
            layers = f"{printable(instance['model'])} {layers_text(stage['layers'])}"
            is_alone = len(instance["stages"]) == 1 and not stage.get("group")
            after = "then another peer loads it for the next request" if is_alone else _THEN
            if not has_others:
                after = "no other peer is there to load it then"
            elif instance["model"] in elsewhere:
                after = "new requests use another instance"
            lines.append(f"{layers} stays here until the node stops; {after}")
    return lines


def _peers(stage: Mapping[str, Any]) -> list[str]:
    """The peers that hold a stage."""
    peers: list[str] = (stage.get("group") or {}).get("peers", [stage["peer"]])
    return peers

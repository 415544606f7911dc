"""Fetch a model to the peers that would hold it: each its own layers, from other peers first and else from the hub.

`--whole` brings all of it, to all peers or to those that `--peers` names. Ctrl-C keeps what was fetched; the same
command goes on from there. The exit code is 0 if every peer has its part, and 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from exo_mesh.cli import exit_codes
from exo_mesh.cli.models import facts
from exo_mesh.cli.models.bars import Bars
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import print_json
from exo_mesh.client.api_client import ApiClient
from exo_mesh.errors import MeshError
from exo_mesh.printable import printable

_START_S = 150.0
"""The hub is asked for headers, and an engine for legal cuts, before a plan is there."""
_POLL_S = 0.5
_GONE_S = 10.0
"""A download of which nothing is heard for so long has ended with its peer."""

Key = tuple[str, str]
"""Peer id and model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, `--peers`, `--whole`, `--api-url`, `--json`."""
    parser.add_argument("model", metavar="MODEL", help="hub id such as Qwen/Qwen3-0.6B, or ID@REVISION")
    parser.add_argument("--peers", metavar="PEERS", help="only at these peers: names or ids, with commas between")
    parser.add_argument("--whole", action="store_true", help="the whole model on each of them")
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """POST `/download/start`, then look at `/v1/download/progress` until it is over."""
    client = ApiClient(args.api_url, args.home)
    peers = [peer for peer in (args.peers or "").split(",") if peer]
    body = {"model": args.model, "peers": peers, "whole": args.whole}
    started = {_key(entry): entry for entry in client.post("/download/start", body, _START_S)["data"]}
    try:
        ended = _follow(client, started, None if args.json else Bars(sys.stdout, keeps=True))
    except KeyboardInterrupt:
        _cancel(client, started)
        print(f"\nexo-mesh: stopped; what was fetched is kept, and {_again(args)} goes on from there", file=sys.stderr)
        return exit_codes.INTERRUPTED
    if args.json:
        print_json(list(ended.values()))
    failed = [entry for entry in ended.values() if entry["state"] == "failed"]
    for entry in failed:
        remedy = f"; {entry['remedy']}" if entry["remedy"] else ""
        text = f"{entry['peer_name']} could not fetch {entry['model']}: {entry['reason']}{remedy}"
        print(f"exo-mesh: {printable(text)}", file=sys.stderr)
    return exit_codes.FAILED if failed else exit_codes.OK


def _follow(client: ApiClient, started: Mapping[Key, dict[str, Any]], bars: Bars | None) -> dict[Key, dict[str, Any]]:
    """Show downloads until all of them have ended; the last that was heard of each."""
    seen = dict(started)
    heard_at = dict.fromkeys(started, time.monotonic())
    try:
        while True:
            now = time.monotonic()
            for entry in client.get("/v1/download/progress")["data"]:
                if _key(entry) in seen:
                    seen[_key(entry)] = entry
                    heard_at[_key(entry)] = now
            for key in (key for key, at in heard_at.items() if now - at > _GONE_S):
                if seen[key]["state"] in facts.UNFINISHED:
                    seen[key] = {**seen[key], "state": "failed", "reason": "nothing is heard of the peer any more"}
            if bars is not None:
                bars.show(seen.values())
            if not any(entry["state"] in facts.UNFINISHED for entry in seen.values()):
                return seen
            time.sleep(_POLL_S)
    finally:
        if bars is not None:
            bars.close()


def _cancel(client: ApiClient, started: Mapping[Key, Any]) -> None:
    for peer, model in started:
        with contextlib.suppress(MeshError):  # it has just ended, or the node is gone
            client.delete(f"/download/{urllib.parse.quote(peer, safe='')}/{facts.model_path(model)}")


def _again(args: argparse.Namespace) -> str:
    peers = f" --peers {args.peers}" if args.peers else ""
    return f"`exo-mesh pull {args.model}{peers}{' --whole' if args.whole else ''}`"


def _key(entry: Mapping[str, Any]) -> Key:
    return entry["peer_id"], entry["model"]

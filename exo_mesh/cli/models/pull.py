"""Fetch a model to the peers that would hold it: each its own layers, from other peers first and else from the hub.

`--whole` brings all of it, to the node called or to the peers that `--peers` names. Ctrl-C keeps what was fetched; the
same command goes on from there. The exit code is 0 if every peer has its part, and 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from exo_mesh.cli import exit_codes
from exo_mesh.cli.models import facts
from exo_mesh.cli.models.bars import Bars
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import print_json
from exo_mesh.client.api_client import ApiClient
from exo_mesh.errors import DeadlineError, MeshError, with_remedy
from exo_mesh.printable import printable

_START_S = 150.0
"""The hub is asked for headers, and an engine for legal cuts, before a plan is there."""
_POLL_S = 0.5
_SETTLE_S = 2.0
"""Until then the node may not have heard yet of downloads that other peers have begun."""
_GONE_S = 10.0
"""A download of which nothing is heard for so long has ended with its peer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, `--peers`, `--whole`, `--api-url`, `--json`."""
    parser.add_argument("model", metavar="MODEL", help="hub id such as Qwen/Qwen3-0.6B, or ID@REVISION")
    parser.add_argument("--peers", metavar="PEERS", help="only at these peers: names or ids, with commas between")
    parser.add_argument("--whole", action="store_true", help="the whole model, on --peers or else on the node called")
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """POST `/download/start`, then look at `/v1/download/progress` until it is over."""
    client = ApiClient(args.api_url, args.home)
    peers = [peer for peer in (args.peers or "").split(",") if peer]
    before = client.get("/v1/download/progress")["data"]
    body = {"model": args.model, "peers": peers, "whole": args.whole}
    started = client.post("/download/start", body, _START_S)["data"]
    follower = _Follower(started[0]["model"] if started else args.model, before, started)
    if _is_gguf(args.model, started) and not args.json:
        print(_gguf_line(started, are_named=bool(peers)), flush=True)
    bars = None if args.json else Bars(sys.stdout, keeps=True)
    try:
        follower.follow(client, bars)
    except KeyboardInterrupt:
        follower.cancel(client)
        print(f"\nexo-mesh: stopped; what was fetched is kept, and {_again(args)} goes on from there", file=sys.stderr)
        return exit_codes.INTERRUPTED
    finally:
        if bars is not None:
            bars.close()
    if args.json:
        print_json(list(follower.seen.values()))
    failed = [entry for entry in follower.seen.values() if entry["state"] == "failed"]
    for entry in failed:
        why = with_remedy(entry["reason"], entry["remedy"])
        text = f"{entry['peer_name']} could not fetch {entry['model']}: {why}"
        print(f"exo-mesh: {printable(text)}", file=sys.stderr)
    return exit_codes.FAILED if failed else exit_codes.OK


class _Follower:
    """The downloads of one model since this command began, by peer.

    before: all that there were then. started: those that the node says to have begun, as far as it had heard of them.
    """

    def __init__(self, model: str, before: Iterable[dict[str, Any]], started: Iterable[dict[str, Any]]) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        self._model = model
        self._before = {entry["peer_id"]: entry for entry in before if entry["model"] == model}
        self._started = {entry["peer_id"] for entry in started}
        self._began = time.monotonic()
        self._heard_at: dict[str, float] = {}

    def follow(self, client: ApiClient, bars: Bars | None) -> None:
        """Look and show until all downloads have ended. Raises MeshError if none begins."""
        while True:
            now = time.monotonic()
            self._take(client.get("/v1/download/progress")["data"], now)
            if bars is not None:
                bars.show(self.seen.values())
            is_settled = now - self._began >= _SETTLE_S
            if self.seen and is_settled and not any(map(_is_under_way, self.seen.values())):
                return
            if not self.seen and now - self._began >= _GONE_S:
                raise DeadlineError(f"no peer has begun to fetch {self._model}")
            time.sleep(_POLL_S)

    def cancel(self, client: ApiClient) -> None:
        """End what is under way."""
        for peer in [peer for peer, entry in self.seen.items() if _is_under_way(entry)]:
            with contextlib.suppress(MeshError):  # it has just ended, or the node is gone
                client.delete(f"/download/{urllib.parse.quote(peer, safe='')}/{facts.model_path(self._model)}")

    def _take(self, entries: Iterable[dict[str, Any]], now: float) -> None:
        for entry in (one for one in entries if one["model"] == self._model):
            peer = entry["peer_id"]
            is_of_before = not _is_under_way(entry) and entry == self._before.get(peer)
            if not is_of_before or (peer in self._started and now - self._began >= _SETTLE_S):
                self.seen[peer], self._heard_at[peer] = entry, now
        for peer, entry in self.seen.items():
            if _is_under_way(entry) and now - self._heard_at[peer] >= _GONE_S:
                self.seen[peer] = {**entry, "state": "failed", "reason": "it was cancelled, or the peer has gone"}


def _is_under_way(entry: Mapping[str, Any]) -> bool:
    return entry["state"] in facts.UNFINISHED


def _is_gguf(name: str, started: list[dict[str, Any]]) -> bool:
    """Whether `REPO:QUANT` has begun the download of GGUF files, whose name ends with the quantisation."""
    _, _, tag = name.rpartition(":")
    return any(entry["is_whole"] and entry["model"].endswith(f"-{tag.upper()}") for entry in started)


def _gguf_line(started: list[dict[str, Any]], *, are_named: bool) -> str:
    where = ", ".join(entry["peer_name"] or entry["peer_id"][:8] for entry in started)
    others = "" if are_named else " (--peers chooses others)"
    return printable(f"GGUF: all files of it go to {where}{others}; no engine of exo-mesh reads them yet")


def _again(args: argparse.Namespace) -> str:
    peers = f" --peers {args.peers}" if args.peers else ""
    return f"`exo-mesh pull {args.model}{peers}{' --whole' if args.whole else ''}`"

"""Download a model to the peers that would hold it: each its own layers, from other peers or else from the hub.

`--whole` downloads all of it, to the node called or to the peers that `--peers` names. Ctrl-C keeps the downloaded
part, and the same command resumes. The exit code is 0 if every peer has its part, and 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

from exo_mesh.base.printable import printable
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags, api_words, model_argument
from exo_mesh.cli.tables import print_json
from exo_mesh.cli.verbs.models import facts
from exo_mesh.cli.verbs.models.bars import Bars
from exo_mesh.errors import DeadlineError, MeshError, with_remedy

_START_S = 150.0
"""A plan first needs the headers from the hub, and the legal cuts from an engine."""
_POLL_S = 0.5
_SETTLE_S = 2.0
"""Longest time until the node knows of downloads that other peers have started."""
_GONE_S = 10.0
"""A download without reports for this long counts as failed: its peer has gone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, `--peers`, `--whole`, `--api-url`, `--json`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=model_argument,
        help="hub id: Qwen/Qwen3-0.6B, ID@REVISION, or ID:Q4_K_M for GGUF",
    )
    parser.add_argument(
        "--peers", metavar="PEERS", help="download to these peers only: names or ids, separated by commas"
    )
    parser.add_argument(
        "--whole", action="store_true", help="download the whole model, to --peers or else to the node called"
    )
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Calls `POST /download/start`, then shows `/v1/download/progress` until all downloads have ended."""
    client = ApiClient(args.api_url, args.home)
    peers = [peer for peer in (args.peers or "").split(",") if peer]
    before = client.get("/v1/download/progress")["data"]
    body = {"model": args.model, "peers": peers, "whole": args.whole}
    started = client.post("/download/start", body, _START_S)["data"]
    follower = _Follower(started[0]["model"] if started else args.model, before, started)
    if _is_gguf(args.model, started) and not (args.json or args.whole):
        print(_gguf_line(started, are_named=bool(peers)), flush=True)
    bars = None if args.json else Bars(sys.stdout, keeps=True)
    try:
        follower.follow(client, bars)
    except KeyboardInterrupt:
        follower.cancel(client)
        print(f"\nexo-mesh: stopped; the downloaded part is kept, and {_again(args)} resumes", file=sys.stderr)
        return exit_codes.INTERRUPTED
    finally:
        if bars is not None:
            bars.close()
    if args.json:
        print_json(list(follower.seen.values()))
    failed = [entry for entry in follower.seen.values() if entry["state"] == "failed"]
    for entry in failed:
        why = with_remedy(entry["reason"], entry["remedy"])
        text = f"{entry['peer_name']} could not download {entry['model']}: {why}"
        print(f"exo-mesh: {printable(text)}", file=sys.stderr)
    return exit_codes.FAILED if failed else exit_codes.OK


class _Follower:
    """Follows the downloads of one model that this command started, by peer.

    before: all downloads before the command. started: those that the node reported as started.
    """

    def __init__(self, model: str, before: Iterable[dict[str, Any]], started: Iterable[dict[str, Any]]) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        self._model = model
        self._before = {entry["peer_id"]: entry for entry in before if entry["model"] == model}
        self._started = {entry["peer_id"] for entry in started}
        self._began = time.monotonic()
        self._heard_at: dict[str, float] = {}

    def follow(self, client: ApiClient, bars: Bars | None) -> None:
        """Polls and shows the downloads until all have ended. Raises MeshError if none starts."""
        while True:
            now = time.monotonic()
            self._take(client.get("/v1/download/progress")["data"], now)
            if bars is not None:
                bars.show(self.seen.values())
            is_settled = now - self._began >= _SETTLE_S
            if self.seen and is_settled and not any(map(_is_under_way, self.seen.values())):
                return
            if not self.seen and now - self._began >= _GONE_S:
                raise DeadlineError(f"no peer has started to download {self._model} within {_GONE_S:g} s")
            time.sleep(_POLL_S)

    def cancel(self, client: ApiClient) -> None:
        """Cancels the downloads that still run."""
        for peer in [peer for peer, entry in self.seen.items() if _is_under_way(entry)]:
            with contextlib.suppress(MeshError):  # the download has just ended, or the node has gone
                client.delete(f"/download/{urllib.parse.quote(peer, safe='')}/{facts.model_path(self._model)}")

    def _take(self, entries: Iterable[dict[str, Any]], now: float) -> None:
        for entry in (one for one in entries if one["model"] == self._model):
            peer = entry["peer_id"]
            # an ended download that has not changed is from before, unless its peer was started and had nothing to do
            is_of_before = not _is_under_way(entry) and entry == self._before.get(peer)
            if not is_of_before or (peer in self._started and now - self._began >= _SETTLE_S):
                self.seen[peer], self._heard_at[peer] = entry, now
        for peer, entry in self.seen.items():
            # without reports the record is gone: cancelled, or lost with its peer
            if _is_under_way(entry) and now - self._heard_at[peer] >= _GONE_S:
                self.seen[peer] = {**entry, "state": "failed", "reason": "cancelled, or the peer has gone"}


def _is_under_way(entry: Mapping[str, Any]) -> bool:
    return entry["state"] in facts.UNFINISHED


def _is_gguf(name: str, started: list[dict[str, Any]]) -> bool:
    """Whether `REPO:QUANT` started a download of GGUF files that cannot be run: of whole files, though --whole was not
    given, whose model name ends with the quantisation."""
    _, _, tag = name.rpartition(":")
    return any(entry["is_whole"] and entry["model"].endswith(f"-{tag.upper()}") for entry in started)


def _gguf_line(started: list[dict[str, Any]], *, are_named: bool) -> str:
    where = ", ".join(entry["peer_name"] or entry["peer_id"][:8] for entry in started)
    others = "" if are_named else " (--peers chooses others)"
    return printable(f"GGUF: all its files are downloaded to {where}{others}; exo-mesh cannot run this model")


def _again(args: argparse.Namespace) -> str:
    words = ["exo-mesh", "pull", args.model, *(["--peers", args.peers] if args.peers else [])]
    return f"`{shlex.join([*words, *(['--whole'] if args.whole else []), *api_words(args)])}`"

"""Place a model over peers, and wait until it is ready.

Without wishes the mesh chooses the fewest peers that hold the model. `--plan N` takes the plan that has number N in
`exo-mesh preview MODEL` now. `--layers` names the layers of each peer, and so also their order: `alpha=0-3,beta=4-7`;
with an engine `alpha=0-3:mlx`; for a tensor group `alpha+beta=0-3`. Ctrl-C ends the wait only.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from exo_mesh.base.printable import counted, printable, quoted
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.mesh_nodes import MeshNodes
from exo_mesh.cli.parser import add_api_flags, api_words, model_argument
from exo_mesh.cli.tables import fitted, layers_text, line_width, peer_names, print_json, say
from exo_mesh.cli.verbs.models.waiting import WaitingScreen
from exo_mesh.cli.verbs.preview import (
    add_wish_flags,
    describe,
    find_previews,
    peer_count,
    plans_of,
    refuse_zero,
    wishes,
)
from exo_mesh.cli.wording import in_words_of_flags
from exo_mesh.domain.peer_names import peers_named
from exo_mesh.errors import InputError

_READY_S = 6 * 3600.0
"""The peers may first download the model, which takes hours over a slow line."""

_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?(?::([\w.-]+))?")


class _Peer(NamedTuple):
    id: str
    name: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, `--plan`, `--peers`, `--on`, `--layers`, `--policy`, the wishes of `preview`, `--api-url`,
    `--json`."""
    parser.add_argument(
        "model", metavar="MODEL", type=model_argument, help="hub id, or a name that exo-mesh list shows"
    )
    parser.add_argument("--plan", type=int, metavar="N", help="the plan with this number in exo-mesh preview MODEL now")
    parser.add_argument(
        "--peers", "--min-peers", type=peer_count, metavar="N", help="at least this many peers; the mesh chooses them"
    )
    parser.add_argument("--on", metavar="PEERS", help="exactly these peers: names or ids, separated by commas")
    parser.add_argument(
        "--layers",
        metavar="PEER=A-B,…",
        help="the layers of each peer, first and last, such as alpha=0-3,beta=4-7; together all layers",
    )
    parser.add_argument(
        "--policy",
        choices=("memory", "latency", "throughput"),
        help="what the mesh aims at: the fewest peers, the shortest answer, or the most tokens per second",
    )
    add_wish_flags(parser)
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Calls `POST /instance`, shows why it waits, and prints the stages."""
    _refuse_contradictions(args)
    client = ApiClient(args.api_url, args.home)
    with in_words_of_flags(client):
        body = _body(client, args)
    began = time.monotonic()
    client.get("/healthz")
    if not (args.json or sys.stderr.isatty()):
        print(f"loading {args.model} …", file=sys.stderr, flush=True)
    try:
        with in_words_of_flags(client), WaitingScreen(MeshNodes(client), body["model"], asks=False) as screen:
            instance: dict[str, Any] = client.post("/instance", body, _READY_S)
            screen.end()
    except KeyboardInterrupt:
        end = shlex.join(["exo-mesh", "stop", args.model, *api_words(args)])
        print(f"\nexo-mesh: the mesh goes on loading; `exo-mesh ps` shows it, `{end}` ends it", file=sys.stderr)
        raise
    if args.json:
        print_json(instance)
        return exit_codes.OK
    say(loaded_text(instance, peer_names(client.get("/state")), time.monotonic() - began))
    return exit_codes.OK


def loaded_text(instance: Mapping[str, Any], names: Mapping[str, str], took_s: float) -> str:
    """The instance that is ready: a head line, and a row for each stage."""
    stages: Sequence[dict[str, Any]] = instance["stages"]
    peers = sum(len((stage.get("group") or {}).get("peers", [""])) for stage in stages)
    rows = []
    for stage in stages:
        ids = (stage.get("group") or {}).get("peers") or [stage["peer"]]
        who = " + ".join(names.get(one, one[:8]) for one in ids)
        rows.append([f"  {who}", layers_text(stage["layers"]), stage["engine"]])
    head = f"{printable(instance['model'])} is ready on {counted(peers, 'peer')} after {took_s:.1f} s"
    head += f": context {instance['context_limit']} tokens, instance {instance['id']}"
    note = f"\n  {printable(instance['reason'])}" if instance.get("reason") else ""
    return f"{head}\n{fitted(('  PEER', 'LAYERS', 'ENGINE'), rows, line_width())}{note}"


def _refuse_contradictions(args: argparse.Namespace) -> None:
    given = [name for name in ("plan", "layers", "on", "peers", "policy") if getattr(args, name) is not None]
    alone = [name for name in ("plan", "layers") if name in given]
    if alone and len(given) > 1:
        names = " and ".join(f"--{name}" for name in given)
        raise InputError(f"{names} contradict each other: --{alone[0]} alone says which peers hold which layers")
    if args.on is not None and args.exclude is not None:
        raise InputError("--on and --exclude contradict each other: --on leaves out all other peers", param="on")
    if args.on is not None and args.peers is not None:
        raise InputError("--on and --peers contradict each other: --on says exactly which peers", param="on")
    refuse_zero(args, "plan", "peers")


def _body(client: ApiClient, args: argparse.Namespace) -> dict[str, Any]:
    """The body of `POST /instance`. Raises MeshError for a plan or a peer that is not there."""
    if args.plan is not None:
        return _planned(client, args)
    body = {"model": args.model} | wishes(args)
    if args.exclude is not None:
        body["exclude_peers"] = _words(args.exclude)
    if args.group is not None:
        body["groups"] = [_words(group) for group in args.group]
    if args.on is not None:
        body |= _only_on(_words(args.on), client.get("/state")["view"]["peers"])
    if args.layers is not None:
        body["stages"] = stages_of(args.layers, body.pop("group_backend", None), lambda name: _is_peer(client, name))
    more = {"min_peers": args.peers, "policy": args.policy}
    return body | {name: value for name, value in more.items() if value is not None}


def _planned(client: ApiClient, args: argparse.Namespace) -> dict[str, Any]:
    """The body that places plan N of the previews, which it shows. Raises InputError if there is no such plan."""
    plans = plans_of(find_previews(client, args))
    if args.plan > len(plans):
        there = f"there {'is' if len(plans) == 1 else 'are'} {counted(len(plans), 'plan')}"
        raise InputError(f"--plan {args.plan}: {there} now; `exo-mesh preview {args.model}` shows them", param="plan")
    if not args.json:
        print(describe(plans[args.plan - 1], args.plan), file=sys.stderr, flush=True)
    request: dict[str, Any] = plans[args.plan - 1]["request"]
    return request


def _is_peer(client: ApiClient, name: str) -> bool:
    return any(peer["name"] == name for peer in client.get("/state")["view"]["peers"])


def _only_on(wanted: Sequence[str], peers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of the body that place a model on exactly these peers. Raises InputError for an unknown one."""
    known = [_Peer(str(peer["id"]), str(peer["name"])) for peer in peers]
    chosen = {peer.id for peer in peers_named(wanted, known, "on")}
    if not chosen:
        raise InputError("--on names no peer", param="on")
    return {"exclude_peers": sorted({peer.id for peer in known} - chosen), "min_peers": len(chosen)}


def stages_of(text: str, backend: str | None, is_peer: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Stages of `alpha=0-3,beta=4:mlx,gamma+delta=5-7`. backend: of the groups. is_peer: whether a peer has this name;
    asked only for a name with a plus. Raises InputError."""
    stages: list[dict[str, Any]] = []
    used: set[str] = set()
    for word in _words(text):
        name, _, layers = word.rpartition("=")
        found = _RANGE.fullmatch(layers.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        names = (
            [one.strip() for one in name.split("+")] if "+" in name and not is_peer(name.strip()) else [name.strip()]
        )
        if found is None or not all(names) or first > last:
            raise InputError(f"--layers {quoted(word)}: write PEER=FIRST-LAST, such as alpha=0-3", param="layers")
        if twice := used.intersection(names) or {one for one in names if names.count(one) > 1}:
            raise InputError(f"--layers names {quoted(min(twice))} twice: a peer holds one range", param="layers")
        used.update(names)
        stages.append({"peer": names[0], "layers": [first, last + 1]})
        if found[3]:
            stages[-1]["engine"] = found[3]
        if len(names) > 1:
            stages[-1]["group"] = {"peers": names, "backend": backend or "auto"}
    if not stages:
        raise InputError("--layers names no peer: write PEER=FIRST-LAST, such as alpha=0-3", param="layers")
    if backend and not any("group" in stage for stage in stages):
        raise InputError("--group-backend: --layers names no tensor group, such as alpha+beta=0-3", param="layers")
    return stages


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]

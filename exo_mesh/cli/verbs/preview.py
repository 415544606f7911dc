"""Show how a model could be placed now: which peer would hold which layers, how much memory, and what stays free.

The last line is the command that loads the model as the last plan says, whatever memory is free by then. `exo-mesh load
MODEL --plan N` takes the plan that has number N at that time.
"""

from __future__ import annotations

import argparse
import re
import shlex
import urllib.parse
from collections.abc import Mapping
from typing import Any

from exo_mesh.base.printable import counted, quoted
from exo_mesh.base.telemetry.tables import human_bytes
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags, api_words, model_argument
from exo_mesh.cli.tables import fitted, layers_text, line_width, peer_names, print_json, say
from exo_mesh.cli.wording import in_words_of_flags, names_for, reworded
from exo_mesh.errors import InputError

_DEADLINE_S = 150.0
"""An engine may first have to trace the model to find where it can be cut."""

_HEADER = ("  PEER", "LAYERS", "ENGINE", "WEIGHTS", "KV", "OVERHEAD", "USABLE", "LEFT")
_PARTS = ("weights_bytes", "kv_bytes", "overhead_bytes", "usable_bytes", "headroom_bytes")


_WISHES = {
    "context_limit": "--context-limit",
    "engine": "--engine",
    "mixed_rings": "--mixed-rings",
    "tensor_group": "--tensor-group",
    "group": "--group",
    "group_backend": "--group-backend",
    "exclude": "--exclude",
}
"""The flags of add_wish_flags by the name of their argument."""
_PLAIN_NAME = re.compile(r"\w[\w.-]*")
ID_CHARS = 12
"""Of an id where a name will not do."""
_FIELDS = {"group": "groups", "exclude": "exclude_peers"}
"""The names of placement options in the API, where they differ from the names of the arguments."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, `--peers`, the wishes, `--api-url`, `--json`."""
    parser.add_argument(
        "model", metavar="MODEL", type=model_argument, help="hub id, or a name that exo-mesh list shows"
    )
    parser.add_argument("--peers", "--min-peers", type=peer_count, metavar="N", help="only plans of at least N peers")
    add_wish_flags(parser)
    add_api_flags(parser)


def add_wish_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the wishes for a placement that `preview` and `load` share: `--context-limit`, `--engine`, `--mixed-rings`,
    `--tensor-group`, `--group`, `--group-backend`, `--exclude`."""
    parser.add_argument("--context-limit", type=int, metavar="N", help="tokens of prompt + output that must fit")
    parser.add_argument("--engine", metavar="NAME", help="use only this engine")
    parser.add_argument(
        "--mixed-rings", choices=("auto", "never", "always"), help="allow different engines in one ring"
    )
    parser.add_argument(
        "--tensor-group", type=int, metavar="N", help="let a tensor group of N peers be one stage; 1 = no groups"
    )
    parser.add_argument(
        "--group",
        action="append",
        metavar="PEERS",
        help="let these peers be one stage, the leader first; may be repeated",
    )
    parser.add_argument(
        "--group-backend", choices=("auto", "ring", "jaccl", "jaccl-ring"), help="how the peers of a group communicate"
    )
    parser.add_argument("--exclude", metavar="PEERS", help="names or ids of peers to leave out, separated by commas")


def run(args: argparse.Namespace) -> int:
    """Prints `GET /instance/previews`; exit code 1 if no placement is possible."""
    refuse_zero(args, "peers")
    client = ApiClient(args.api_url, args.home)
    with in_words_of_flags(client):
        answer = find_previews(client, args)
    numbers = {id(plan): number for number, plan in enumerate(plans_of(answer), 1)}
    answer["previews"] = [entry for entry in answer["previews"] if entry["width"] >= (args.peers or 1)]
    plans = plans_of(answer)
    if args.json:
        print_json(answer)
    elif not answer["previews"]:
        say(f"no plan has {args.peers} peers or more; ask for fewer with --peers")
    else:
        refusals = [entry["refused"] for entry in answer["previews"] if "refused" in entry]
        names = names_for(client, *(refusal["message"] for refusal in refusals))
        for refusal in refusals:
            refusal["message"] = reworded(refusal["message"], names)
        say("\n\n".join(describe(entry, numbers.get(id(entry), 0)) for entry in answer["previews"]))
    if plans and not args.json:
        command = load_command(args, plans[-1], peer_names(client.get("/state")))
        print(f"\nTo load plan {numbers[id(plans[-1])]} as it is shown: {command}")
    return exit_codes.OK if plans else exit_codes.FAILED


def peer_count(text: str) -> int:
    """A number of peers. Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a number of peers; `exo-mesh load --on` names peers")
    return int(text)


def refuse_zero(args: argparse.Namespace, *names: str) -> None:
    """Raises InputError if a flag of these names is given with a number below 1."""
    for name in names:
        if (number := getattr(args, name)) is not None and number < 1:
            raise InputError(f"--{name} {number}: a whole number of at least 1 is needed", param=name)


def wishes(args: argparse.Namespace) -> dict[str, Any]:
    """The given wishes, by the names that they have in the API."""
    given = {name: getattr(args, name) for name in _WISHES}
    return {_FIELDS.get(name, name): value for name, value in given.items() if value is not None}


def find_previews(client: ApiClient, args: argparse.Namespace) -> dict[str, Any]:
    """The answer of `GET /instance/previews` for the model and the wishes. Raises MeshError."""
    query = urllib.parse.urlencode({"model": args.model} | wishes(args), doseq=True)
    answer: dict[str, Any] = client.get(f"/instance/previews?{query}", _DEADLINE_S)
    return answer


def plans_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The possible placements among the previews; `--plan N` takes the N-th."""
    return [entry for entry in answer["previews"] if "refused" not in entry]


def load_command(args: argparse.Namespace, entry: dict[str, Any], names: Mapping[str, str]) -> str:
    """The command that loads the model as this plan says, ready to paste. names: of peers, by id."""
    words = ["exo-mesh", "load", args.model, "--layers", ",".join(_layers_word(one, names) for one in entry["stages"])]
    given = {name: getattr(args, name) for name in ("context_limit", "mixed_rings")}
    backends = [stage["group"]["backend"] for stage in entry["stages"] if stage.get("group")]
    given["group_backend"] = backends[0] if backends else None
    for name, value in given.items():
        words += [] if value is None else [_WISHES[name], str(value)]
    return shlex.join([*words, *api_words(args)])


def _layers_word(stage: dict[str, Any], names: Mapping[str, str]) -> str:
    """A stage as `--layers` takes it: `alpha=0-3:mlx`, or `alpha+beta=0-3:mlx` for a tensor group. Names that could be
    read otherwise give way to ids."""
    ids = (stage.get("group") or {}).get("peers") or [stage["peer"]]
    called = [name if _PLAIN_NAME.fullmatch(name := names.get(one, "")) else one[:ID_CHARS] for one in ids]
    return f"{'+'.join(called)}={layers_text(stage['layers'])}:{stage['engine']}"


def describe(entry: dict[str, Any], number: int = 0) -> str:
    """The text of one preview: a head line, and a table of its stages; or why it is not possible. number: of the plan;
    0 shows none."""
    width = counted(entry["width"], "peer")
    if "refused" in entry:
        return f"{width}: not possible. {entry['refused']['message']}"
    plan = f"plan {number}: " if number else ""
    head = (
        f"{plan}{width} (--policy {' or '.join(entry['policies'])}): context {entry['context_limit']} tokens, "
        f"KV for {entry['kv_pool_tokens']} tokens on every stage"
    )
    if entry.get("activation_dtype"):
        head += f", activations as {entry['activation_dtype']}"
    if predicted := entry.get("predicted"):
        head += (
            f"\n  one client: about {predicted['tokens_per_s']:.3g} tokens/s, first token after "
            f"{predicted['ttft_s']:.2g} s for a prompt of {counted(predicted['prompt_tokens'], 'token')}"
        )
    rows = [
        [
            f"  {stage['name'] or stage['peer'][:8]}{_others(stage)}",
            layers_text(stage["layers"]),
            stage["engine"],
            *(human_bytes(stage[part]) for part in _PARTS),
        ]
        for stage in entry["stages"]
    ]
    note = f"\n  {entry['note']}" if entry.get("note") else ""
    return f"{head}\n{fitted(_HEADER, rows, line_width())}{note}"


def _others(stage: dict[str, Any]) -> str:
    """` + 1 (jaccl)` for a tensor group of two, whose figures are per peer; "" without a group."""
    group = stage.get("group")
    return f" + {len(group['peers']) - 1} ({group['backend']})" if group else ""

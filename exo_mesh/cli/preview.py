"""Show how a model could be placed now: which peer would hold which layers, how much memory, and what stays free."""

from __future__ import annotations

import argparse
import urllib.parse
from typing import Any

from exo_mesh.cli import exit_codes
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import layers_text, print_json
from exo_mesh.client.api_client import ApiClient
from exo_mesh.printable import counted
from exo_mesh.telemetry.tables import columns, human_bytes

_DEADLINE_S = 150.0
"""An engine may first have to trace the model to find where it can be cut."""

_HEADER = ("  PEER", "LAYERS", "ENGINE", "WEIGHTS", "KV", "OVERHEAD", "USABLE", "LEFT")
_PARTS = ("weights_bytes", "kv_bytes", "overhead_bytes", "usable_bytes", "headroom_bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, `--context-limit`, `--engine`, `--mixed-rings`, `--tensor-group`, `--group`, `--group-backend`,
    `--exclude`, `--api-url`, `--json`."""
    parser.add_argument("model", metavar="MODEL", help="hub id, or a name that exo-mesh list shows")
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
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints `GET /instance/previews`; exit code 1 if no placement is possible."""
    wish = {
        "model": args.model,
        "context_limit": args.context_limit,
        "engine": args.engine,
        "exclude_peers": args.exclude,
        "mixed_rings": args.mixed_rings,
        "tensor_group": args.tensor_group,
        "groups": args.group,
        "group_backend": args.group_backend,
    }
    query = urllib.parse.urlencode({name: value for name, value in wish.items() if value is not None}, doseq=True)
    answer = ApiClient(args.api_url, args.home).get(f"/instance/previews?{query}", _DEADLINE_S)
    if args.json:
        print_json(answer)
    else:
        print("\n\n".join(describe(entry) for entry in answer["previews"]))
    possible = any("refused" not in entry for entry in answer["previews"])
    return exit_codes.OK if possible else exit_codes.FAILED


def describe(entry: dict[str, Any]) -> str:
    """The text of one preview: a head line, and a table of its stages; or why it is not possible."""
    width = counted(entry["width"], "peer")
    if "refused" in entry:
        return f"{width}: not possible. {entry['refused']['message']}"
    head = (
        f"{width} (--placement {' or '.join(entry['policies'])}): context {entry['context_limit']} tokens, "
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
    return f"{head}\n{columns(_HEADER, rows)}{note}"


def _others(stage: dict[str, Any]) -> str:
    """` + 1 (jaccl)` for a tensor group of two, whose figures are per peer; "" without a group."""
    group = stage.get("group")
    return f" + {len(group['peers']) - 1} ({group['backend']})" if group else ""

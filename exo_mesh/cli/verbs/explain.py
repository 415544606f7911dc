"""Show which stages computed a request, and from which token on its prompt differs from what the mesh had kept."""

from __future__ import annotations

import argparse
import urllib.parse
from collections.abc import Mapping
from typing import Any

from exo_mesh.base.printable import counted, printable
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import layers_text, print_json, say
from exo_mesh.errors import InputError, MeshError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds REQUEST, `--api-url`, `--json`."""
    text = "id of a request, as in its reply or its x-request-id; by default the last one that entered at the node"
    parser.add_argument("request", metavar="REQUEST", nargs="?", help=text)
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Calls `GET /v1/requests/{id}/stages` and `…/prefix` at the node where the request entered."""
    client = ApiClient(args.api_url, args.home)
    path = f"/v1/requests/{urllib.parse.quote(args.request or _last_request(client), safe='')}"
    legs = _legs(client, path)
    try:
        found = client.get(f"{path}/prefix")
    except MeshError as exc:
        if exc.code != "not_found" or not legs or args.json:
            raise
        say("\n".join([*map(computed_by, legs), str(exc)]))  # a short prompt is not kept
        return exit_codes.OK
    if args.json:
        print_json({**found, "legs": legs})
    else:
        say("\n".join([*map(computed_by, legs), describe(found)]))
    return exit_codes.OK


def _legs(client: ApiClient, path: str) -> list[dict[str, Any]]:
    """The rings that computed the answer; empty if the node does not know them, as nodes of older versions."""
    try:
        legs: list[dict[str, Any]] = client.get(f"{path}/stages")["legs"]
    except MeshError as exc:
        if exc.code != "not_found":
            raise
        return []
    return legs


def computed_by(leg: Mapping[str, Any]) -> str:
    """One ring as a sentence: `computed by alice 0-17 → bob 18-35`; of a later one, what it took over."""
    ring = " → ".join(f"{' + '.join(stage['names'])} {layers_text(stage['layers'])}" for stage in leg["stages"])
    if leg["pause_s"] is None and not leg["from_token"]:
        return f"computed by {printable(ring)}"
    pause = "" if leg["pause_s"] is None else f", after a pause of {leg['pause_s']:.1f} s"
    return f"from token {leg['from_token']} on by {printable(ring)}{pause}"


def _last_request(client: ApiClient) -> str:
    """The id of the last request that has ended. Raises InputError if there is none."""
    recent = client.get("/requests/recent?n=1")["requests"]
    if not recent:
        raise InputError("no request has ended at this node yet; name one of another node with its id", param="request")
    return str(recent[0]["request_id"])


def drafted(found: Mapping[str, Any]) -> str:
    """What drafts did for the answer, as a sentence; empty without drafts, and from a node of an older version."""
    accepted, rejected = found.get("accepted_drafts", 0), found.get("rejected_drafts", 0)
    if not accepted + rejected:
        return ""
    per_lap = found["output_tokens"] / max(1, found["output_tokens"] - accepted)
    return f"{per_lap:.1f} tokens per lap: {accepted} of {counted(accepted + rejected, 'drafted token')} were right"


def describe(found: Mapping[str, Any]) -> str:
    """The answer as sentences."""
    total, cached, common = found["prompt_tokens"], found["cached_tokens"], found["common_tokens"]
    first_s = found["first_token_s"]
    took = "" if first_s is None else f"; its first token came after {first_s:.2f} s"
    lines = [
        f"{cached} of the {counted(total, 'token')} of the prompt came from the prefix cache, "
        f"{total - cached} were computed{took}"
    ]
    if drafts := drafted(found):
        lines.append(drafts)
    if not common:
        lines.append("nothing that was kept begins with the first 64 tokens of this prompt")
    elif common >= total - 1:
        lines.append("all of it was known, but for the last token, which is always computed")
    else:
        lines.append(
            f"the kept sequence that begins most like it has its first {counted(common, 'token')}, and then differs"
        )
    if common and "text_before" in found:
        lines.append(f"  both:         …{printable(found['text_before'])}")
        lines.append(f"  this request: {printable(found['text_here'])}…")
        other = f"{printable(found['text_there'])}…" if found["nearest_is_own"] else "(of another caller)"
        lines.append(f"  what is kept: {other}")
    return "\n".join(lines)

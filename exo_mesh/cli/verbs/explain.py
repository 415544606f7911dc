"""Show why the prompt of a request was computed again: from which token on it differs from what the mesh had kept."""

from __future__ import annotations

import argparse
import urllib.parse
from collections.abc import Mapping
from typing import Any

from exo_mesh.base.printable import counted, printable
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags
from exo_mesh.cli.tables import print_json, say
from exo_mesh.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds REQUEST, `--api-url`, `--json`."""
    text = "id of a request, as in its reply or its x-request-id; by default the last one that entered at the node"
    parser.add_argument("request", metavar="REQUEST", nargs="?", help=text)
    add_api_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Calls `GET /v1/requests/{id}/prefix` at the node where the request entered."""
    client = ApiClient(args.api_url, args.home)
    request = args.request or _last_request(client)
    found = client.get(f"/v1/requests/{urllib.parse.quote(request, safe='')}/prefix")
    print_json(found) if args.json else say(describe(found))
    return exit_codes.OK


def _last_request(client: ApiClient) -> str:
    """The id of the last request that has ended. Raises InputError if there is none."""
    recent = client.get("/requests/recent?n=1")["requests"]
    if not recent:
        raise InputError("no request has ended at this node yet; name one of another node with its id", param="request")
    return str(recent[0]["request_id"])


def describe(found: Mapping[str, Any]) -> str:
    """The answer as sentences."""
    total, cached, common = found["prompt_tokens"], found["cached_tokens"], found["common_tokens"]
    first_s = found["first_token_s"]
    took = "" if first_s is None else f"; its first token came after {first_s:.2f} s"
    lines = [
        f"{cached} of the {counted(total, 'token')} of the prompt came from the prefix cache, "
        f"{total - cached} were computed{took}"
    ]
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

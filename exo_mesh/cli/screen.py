"""Prints the start and the end of a node: as text for people, for programs as one JSON object per event.

Later events, such as peers that join or leave, go to the log.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Protocol

import msgspec
from msgspec.structs import replace

from exo_mesh.base.printable import cells, printable
from exo_mesh.base.telemetry.tables import human_bytes
from exo_mesh.cli.terminal import BOLD, DIM, YELLOW, shows_styles, styled
from exo_mesh.domain.device import API, EDGE, FULL
from exo_mesh.security.local_token import read_token
from exo_mesh.security.secret import fingerprint
from exo_mesh.settings.config import home_of
from exo_mesh.settings.default_paths import DEFAULT_API_URL

DEMO_MODEL = "exo-mesh-demo"
FIRST_QUESTION = "Count from 7 to 20."
_ROLE_TEXTS = {
    API: "serves requests, holds no layers",
    EDGE: "holds layers only of models that the other peers cannot hold",
}


class NodeFacts(msgspec.Struct, frozen=True):
    """Facts about a node that has just started.

    notes: sentences about surprises, such as a port that was taken. page_url: of the web page; empty if not served.
    started_s: duration of the start in seconds. access: says who may do what over the API; access and api_url are empty
    with --no-api. needs_key: every call needs a key or the local token. The token itself is left out, because programs
    write these facts to logs.
    """

    node_id: str
    name: str
    version: str
    grpc_address: str
    addresses: tuple[str, ...]
    api_url: str
    engine: str
    engine_reason: str
    usable_bytes: int
    total_bytes: int
    models: tuple[str, ...]
    namespace: str
    mesh_is_open: bool
    home: str
    access: str
    needs_key: bool = False
    tls_cert: str = ""
    notes: tuple[str, ...] = ()
    page_url: str = ""
    health_url: str = ""
    started_s: float = 0.0
    role: str = FULL


class Screen(Protocol):
    """Reports that a node has started or is stopping."""

    def started(self, facts: NodeFacts) -> None: ...

    def stopping(self, reason: str) -> None: ...


class JsonScreen:
    """Writes one JSON line per event: `{"event": "ready" | "stopping", ...}`. write: takes a line; default: stdout."""

    def __init__(self, write: Callable[[str], object] | None = None) -> None:
        self._write = write or partial(print, flush=True)

    def started(self, facts: NodeFacts) -> None:
        self._say("ready", **msgspec.structs.asdict(replace(facts, namespace=fingerprint(facts.namespace))))

    def stopping(self, reason: str) -> None:
        self._say("stopping", reason=reason)

    def _say(self, event: str, **fields: object) -> None:
        self._write(json.dumps({"event": event, **fields}))


class ConsoleScreen:
    """Writes text for people. file: where to, instead of standard output. It works without rich, because the import of
    rich would take 7 % of the start of a node."""

    def __init__(self, file: IO[str] | None = None) -> None:
        self._file = file

    def started(self, facts: NodeFacts) -> None:
        self._say(f"exo-mesh {facts.version}", BOLD)
        lines = [*_fact_lines(facts), *_page_line(facts)]
        indent = 2 + max(cells(label) for label, _ in lines)
        for label, text in lines:
            shown, *rest = self._wrapped(printable(text), indent)
            self._say(f"{styled(label, DIM) if self._has_styles else label}{' ' * (indent - cells(label))}{shown}")
            for line in rest:
                self._say(" " * indent + line)
        for note in facts.notes:
            self._say(printable(note), YELLOW)
        if facts.mesh_is_open:
            self._say("The mesh is open: no secret is set, so any machine that reaches these ports can join.", YELLOW)
        if facts.api_url:
            self._say(f"\nAsk a question in another terminal:\n{next_steps(facts)}")
        self._say("Ctrl-C stops the node.\n", DIM)

    def stopping(self, reason: str) -> None:
        self._say(f"{reason}: stopping (repeat to force)", DIM)

    @property
    def _stream(self) -> IO[str]:
        return self._file or sys.stdout

    @property
    def _has_styles(self) -> bool:
        return shows_styles(self._stream)

    def _say(self, text: str, style: str = "") -> None:
        print(styled(text, style) if style and self._has_styles else text, file=self._stream, flush=True)

    def _wrapped(self, text: str, indent: int) -> list[str]:
        """The lines of a text beside its label: several on a terminal, one in a file."""
        if not self._stream.isatty():
            return [text]
        return textwrap.wrap(text, max(20, shutil.get_terminal_size().columns - indent)) or [""]


def _fact_lines(facts: NodeFacts) -> list[tuple[str, str]]:
    engine = f"{facts.engine}: {facts.engine_reason}" if facts.engine else f"none: {facts.engine_reason}"
    return [
        ("node", f"{facts.name} ({facts.node_id[:8]}), namespace {fingerprint(facts.namespace)}"),
        ("peers reach it at", ", ".join(facts.addresses)),
        *([] if facts.mesh_is_open else [("mesh", "closed: only peers with the secret can join")]),
        ("engine", engine),
        *([] if facts.role == FULL else [("role", f"{facts.role}: {_ROLE_TEXTS[facts.role]}")]),
        ("memory", f"{human_bytes(facts.usable_bytes)} usable of {human_bytes(facts.total_bytes)}"),
        ("models", ", ".join(facts.models) or "none"),
        ("API", f"{facts.api_url}/v1" if facts.api_url else "off (--no-api)"),
        *([("page", facts.page_url)] if facts.page_url else []),
        *([("health", facts.health_url)] if facts.health_url else []),
        *([("access", facts.access)] if facts.access else []),
    ]


def _page_line(facts: NodeFacts) -> list[tuple[str, str]]:
    """The page's URL with the local token, which gives a browser local rights. Only a terminal shows it, no log."""
    token = read_token(Path(facts.home)) if facts.api_url and sys.stdout.isatty() else ""
    return [("with local rights", f"{facts.api_url}/#token={token}")] if token else []


def next_steps(facts: NodeFacts) -> str:
    """Commands to try next, ready to paste."""
    model = DEMO_MODEL if DEMO_MODEL in facts.models or not facts.models else facts.models[0]
    home = "" if Path(facts.home) == home_of(os.environ) else f" --home {shlex.quote(facts.home)}"
    api = "" if facts.api_url == DEFAULT_API_URL else f" --api-url {facts.api_url}"
    run = f'exo-mesh run {model} "{FIRST_QUESTION}"{api}'
    token = f"exo-mesh key local{home}" if facts.needs_key else ""
    return f"  {run}\n{curl_line(facts.api_url, model, FIRST_QUESTION, token)}"


def curl_line(api_url: str, model: str, question: str, token: str = "") -> str:
    """A curl command for a chat request, over several lines, ready to paste. token: a command that prints a key."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": question}]})
    quoted = body.replace("'", "'\\''")
    key = f'    -H "Authorization: Bearer $({token})" \\\n' if token else ""
    return f"  curl {api_url}/v1/chat/completions -H 'Content-Type: application/json' \\\n{key}    -d '{quoted}'"

"""Mutated HTTP requests to every route. Requests answered 500, or not within 12 s, are listed with the node's state."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

from exo_mesh.security.local_token import read_token
from tools.fuzz.calls import many
from tools.fuzz.mutate import TEXTS, mutated
from tools.fuzz.rig import MODEL, Rig

COUNT, NUM_NODES, CLOSED = 20_000, 1, False
FLAGS = ("--discovery", "none")
ANSWER_S = 12.0
INCOMPLETE_S = 0.5
REST_S = 2.0
"""For the rest of an answer that has begun: if "Connection: close" was mutated, the connection stays open."""
MAX_LISTED = 20

_MESSAGES = [{"role": "user", "content": "Count from 7 to 9."}]
ROUTES: tuple[tuple[str, str, object], ...] = (
    ("POST", "/v1/chat/completions", {"model": MODEL, "max_tokens": 4, "messages": _MESSAGES}),
    ("POST", "/v1/chat/completions", {"model": MODEL, "max_tokens": 4, "messages": _MESSAGES, "stream": True}),
    ("POST", "/v1/completions", {"model": MODEL, "max_tokens": 4, "prompt": "7, 8,"}),
    ("POST", "/v1/messages", {"model": MODEL, "max_tokens": 4, "messages": _MESSAGES}),
    ("POST", "/v1/messages/count_tokens", {"model": MODEL, "messages": _MESSAGES}),
    ("POST", "/api/chat", {"model": MODEL, "options": {"num_predict": 4}, "messages": _MESSAGES}),
    ("POST", "/api/show", {"model": MODEL}),
    ("POST", "/v1/cancel/req_1", None),
    ("POST", "/instance", {"model": MODEL}),
    ("DELETE", f"/instance/{MODEL}-9", None),
    ("POST", "/drain", None),
    ("DELETE", "/drain", None),
    ("DELETE", "/v1/diagnostics/node/quarantine", None),
    *(
        ("GET", path, None)
        for path in (
            "/", "/version", "/health", "/healthz", "/readyz", "/state", "/v1/models", f"/v1/models/{MODEL}",
            "/api/tags", "/api/ps",
            "/v1/topology", "/metrics", "/drain", "/queue", "/requests/recent", "/requests/stats", "/v1/traces",
            "/v1/traces/x", "/v1/diagnostics/node", "/v1/diagnostics/cluster", "/v1/diagnostics/cluster/timeline",
            "/v1/diagnostics/cluster/x", "/memory", "/memory/live", f"/instance/previews?model={MODEL}",
            f"/instance/{MODEL}-1",
        )
    ),
)  # fmt: skip
_HEADERS = (
    "anthropic-version",
    "Content-Encoding",
    "Expect",
    "Idempotency-Key",
    "x-request-id",
    "Origin",
    "Authorization",
    "Accept",
)


def request_bytes(rng: random.Random, number: int, token: str = "") -> bytes:
    """Returns a request with a wrong body, a strange header, or mutated as a whole; half of them with local rights."""
    method, path, body = ROUTES[rng.randrange(len(ROUTES))]
    data = b"" if body is None else json.dumps(body).encode()
    data = mutated(rng, data) if data and number % 3 == 0 else data
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(data)}", "Connection: close"]
    if token and rng.random() < 0.5:
        lines.append(f"Authorization: Bearer {token}")
    if number % 3 == 1:
        value = rng.choice((*TEXTS, "gzip", "100-continue")).replace("\n", " ").replace("\0", "")
        lines.append(f"{rng.choice(_HEADERS)}: {value}")
    whole = "\r\n".join([*lines, "", ""]).encode("utf-8", "replace") + data
    return mutated(rng, whole) if number % 3 == 2 else whole


def is_complete(data: bytes) -> bool:
    """Whether a server can tell that the request is complete: the head has ended, and the body has the announced
    bytes."""
    head, end, body = data.partition(b"\r\n\r\n")
    lengths = re.findall(rb"(?im)^content-length:[ \t]*(\d+)[ \t]*\r?$", head)
    is_plain = len(lengths) == 1 and b"transfer-encoding" not in head.lower() and b"expect" not in head.lower()
    return bool(end) and is_plain and len(body) >= int(lengths[0])


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Sends the requests. A truncated request has no answer until the node's deadline: it is dropped after
    INCOMPLETE_S."""
    token = read_token(Path(rig.nodes[0].ready["home"]))

    async def one(number: int) -> str:
        data = request_bytes(rng, number, token)
        complete = is_complete(data)
        try:
            async with asyncio.timeout(ANSWER_S if complete else INCOMPLETE_S):
                status = await _ask(rig.api_port, data)
        except TimeoutError:
            if not complete:
                return "incomplete"
            status = "NO ANSWER"
        except OSError as exc:
            return type(exc).__name__
        if status in ("500", "NO ANSWER") and len(rig.notes) < MAX_LISTED:
            rig.notes.append(f"{status} to {data[:1000]!r}; {await _state(rig)}")
        return status

    outcomes = await many(count, one)
    await asyncio.to_thread(rig.api.delete, "/drain")
    return outcomes


async def _ask(port: int, data: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        head = await reader.readline()
        with suppress(TimeoutError):
            async with asyncio.timeout(REST_S):
                while await reader.read(65536):
                    pass
    finally:
        writer.close()
    words = head.split()
    return words[1].decode("ascii", "replace") if len(words) > 1 else "closed"


async def _state(rig: Rig) -> str:
    def ask() -> str:
        instances = rig.api.get("/state")["view"]["instances"]
        return ", ".join(f"{one['id']} {one['state']}" for one in instances) or "no instance"

    return await asyncio.to_thread(ask)

"""Bodies of 14 MB that are one long text, at any place where a dialect takes a text: each is sent by several clients at
the same time."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.fuzz.calls import judged, status_of
from tools.fuzz.rig import MODEL, Rig

COUNT, NUM_NODES, CLOSED = 8, 1, False
FLAGS = ("--discovery", "none")
MAX_NODE_SHARE = 1.7
"""As for `values`."""

ANSWER_S = 90.0
NUM_CLIENTS = 10
MAX_CHARS = 14_000_000

TEXTS = {
    "escapes": "def f(a, b): return [a, {b: 1}]\n", "letters": "a", "spaces": " ", "quotes": '"', "backslashes": "\\",
    "Chinese": "中文a ", "controls": "<|im_end|>" + "a" * 90, "base64": "QUJD", "numbers": "1s", "lists": "[],",
}  # fmt: skip
"""Units of long texts. Each byte of a body is one of a text, so that no text in UTF-8 or escapes is longer."""


def _chat(text: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": text}], **fields}


def _tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **function}}]


def places(text: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns paths and bodies that have the text somewhere, by the names of these places."""
    chat, url = "/v1/chat/completions", f"data:image/png;base64,{text}"
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [text]}}}
    return {
        "content": (chat, _chat(text)),
        "part": (chat, _chat([{"type": "text", "text": text}])),
        "system": (chat, {**_chat("a"), "messages": [{"role": "system", "content": text}]}),
        "image": (chat, _chat([{"type": "image_url", "image_url": {"url": url}}])),
        "description": (chat, _chat("a", tools=_tool(description=text))),
        "enum": (chat, _chat("a", response_format=schema)),
        "pattern": (chat, _chat("a", guided_regex=text)),
        "stop": (chat, _chat("a", stop=[text])),
        "model": (chat, {**_chat("a"), "model": text}),
        "variable": (chat, _chat("a", chat_template_kwargs={"a": text})),
        "duration": (chat, _chat("a", keep_alive=text)),
        "unknown": (chat, _chat("a", **{text: 1})),
        "prompt": ("/v1/completions", {"model": MODEL, "max_tokens": 1, "prompt": text}),
        "message": ("/v1/messages", _chat(text)),
        "input": ("/v1/responses", {"model": MODEL, "max_output_tokens": 1, "input": text}),
        "previous": ("/v1/responses", {"model": MODEL, "input": "a", "previous_response_id": f"resp_{text}"}),
        "vector": ("/v1/embeddings", {"model": MODEL, "input": text}),
        "tokenize": ("/tokenize", {"model": MODEL, "prompt": text}),
        "ollama": ("/api/chat", {"model": MODEL, "messages": [{"role": "user", "content": text}]}),
        "show": ("/api/show", {"model": text}),
    }


def case(seed: int, number: int, most: int = MAX_CHARS) -> tuple[str, str, bytes]:
    """Returns a path, a description and a body with a text of about `most` bytes."""
    rng = random.Random(f"{seed}/{number}")
    kind, is_ascii = rng.choice(list(TEXTS)), rng.random() < 0.3
    unit = TEXTS[kind]
    size = len(json.dumps(unit, ensure_ascii=is_ascii).encode()) - 2
    place = rng.choice(list(places("")))
    path, body = places(unit * (most // size))[place]
    return path, f"case {seed}/{number}: {kind} in {place}", json.dumps(body, ensure_ascii=is_ascii).encode()


@contextmanager
def prepared(directory: Path, seed: int, numbers: Sequence[int]) -> Iterator[dict[str, str]]:
    yield {}


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Sends the body of each case by all clients at once, from another process: this one measures."""
    outcomes: Counter[str] = Counter()
    for number in range(rig.first, rig.first + count):
        words = [str(one) for one in (rig.api_port, rig.seed, number)]
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, *words, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await sender.communicate()
        what, *statuses = printed.decode().splitlines()
        outcomes.update(judged(rig, status, what) for status in statuses)
    return outcomes


async def send(port: int, seed: int, number: int) -> None:
    """Sends a case by all clients at once, and prints its description and the statuses."""
    path, what, data = case(seed, number)
    clients = (status_of(port, path, data, ANSWER_S) for _ in range(NUM_CLIENTS))
    print(what, *await asyncio.gather(*clients), sep="\n")


if __name__ == "__main__":
    asyncio.run(send(*map(int, sys.argv[1:])))

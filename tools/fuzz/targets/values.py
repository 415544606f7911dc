"""Bodies that are small on the wire and large once parsed: many values in any field of any dialect."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.fuzz.calls import judged_post
from tools.fuzz.rig import MODEL, Rig
from tools.fuzz.targets import bodies

COUNT, NUM_NODES, CLOSED = 12, 1, False
FLAGS = ("--discovery", "none")
MAX_NODE_SHARE = 1.7
"""A node starts with 88 MiB and has 110 MiB when it has used all it needs; a long text and its body take 33 MiB."""

ANSWER_S = 90.0
MAX_BODY = 15_600_000
"""Bytes: just below what the API takes."""

_HOLE = "HOLE-OF-THE-FUZZER"
_MORE = (
    ("/v1/responses", ({"input": [{"role": "user", "content": "a"}], "max_output_tokens": 4},)),
    ("/v1/embeddings", ({"input": ["a", "b"]},)),
    ("/instance", ({"min_peers": 1},)),
)


def _list_of(value: str) -> Callable[[random.Random, int], str]:
    return lambda rng, most: "[" + ",".join([value] * (most // (len(value) + 1))) + "]"


def _object(rng: random.Random, most: int) -> str:
    number = most // 12
    return "{" + ",".join(f'"{i:x}":0' for i in range(number)) + "}"


def _deep(rng: random.Random, most: int) -> str:
    depth = min(most // 2, rng.choice((500, 100_000, 10**7)))
    return "[" * depth + "]" * depth


def _lists_of_lists(rng: random.Random, most: int) -> str:
    one = "[" + ",".join(["[]"] * 1000) + "]"
    return "[" + ",".join([one] * (most // (len(one) + 1))) + "]"


KINDS: dict[str, Callable[[random.Random, int], str]] = {
    "lists": _list_of("[]"), "objects": _list_of("{}"), "numbers": _list_of("0"), "texts": _list_of('""'),
    "messages": _list_of('{"role":"user","content":"a"}'), "schemas": _list_of('{"type":"string"}'),
    "fields": _object, "deep": _deep, "nested": _lists_of_lists, "long": lambda rng, most: '"' + "a" * most + '"',
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each value inside of a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def case(seed: int, number: int, most: int = MAX_BODY) -> tuple[str, str, bytes]:
    """Returns a path, a description and a body: one field of a good body replaced by as many values as fit into `most`
    bytes, or into fewer."""
    rng = random.Random(f"{seed}/{number}")
    path, choices = rng.choice((*bodies.PATHS, *_MORE))
    body = copy.deepcopy(rng.choice(choices))
    body = {"model": MODEL, **body} if "/api/" in path else {"model": MODEL, "max_tokens": 1, **body}
    if path in ("/v1/responses", "/v1/embeddings", "/instance"):
        del body["max_tokens"]
    body.setdefault("chat_template_kwargs" if path == "/v1/chat/completions" else "metadata", {"a": 1})
    place = rng.choice(list(places(body)))
    kind = rng.choice(list(KINDS))
    owner = body
    for key in place[:-1]:
        owner = owner[key]
    owner[place[-1]] = _HOLE
    text = json.dumps(body)
    filled = text.replace(f'"{_HOLE}"', KINDS[kind](rng, rng.choice((most // 16, most)) - len(text)))
    return path, f"case {seed}/{number}: {kind} in {'.'.join(map(str, place))} of {path}", filled.encode()


@contextmanager
def prepared(directory: Path, seed: int, numbers: Sequence[int]) -> Iterator[dict[str, str]]:
    yield {}


async def attack(rig: Rig, rng: random.Random, count: int) -> Counter[str]:
    """Sends each body alone, and then the last ones again at the same time."""

    async def one(number: int) -> str:
        path, what, data = case(rig.seed, number)
        return await judged_post(rig, path, data, ANSWER_S, what)

    numbers = range(rig.first, rig.first + count)
    alone = [await one(number) for number in numbers]
    together = await asyncio.gather(*map(one, numbers[-4:]))
    return Counter([*alone, *together])

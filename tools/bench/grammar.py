"""Measures what grammars cost a ring and what they save: `python -m tools.bench grammar`.

A ring of four dummy stages of 10 ms each with a vocabulary of 128,000 tokens runs 1 and 16 streams, alternately in
three ways: without a grammar; with a schema of one long string, where every token takes a lap, so that the slowdown is
the cost of the masks; and with a schema of records, whose keys and punctuation are forced. Times start at the first
token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from exo_mesh.cli.bench.local_ring import LocalRunner, even_plan, local_ring, ring_request
from exo_mesh.domain.request import GrammarSpec
from exo_mesh.wire.driver_connection import Ask

STAGES, COST_MS, VOCAB, TOKENS, ROUNDS = 4, 10, 128_000, 256, 5
DEADLINE_S = 120.0
KINDS = ("none", "text", "records")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("grammar", help="what grammars cost and save on a ring", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(measure(write_model(Path(scratch)), args.rounds))
    return 0


def write_model(model_dir: Path) -> Path:
    """Writes a byte-level BPE vocabulary of VOCAB tokens: the bytes, and words of 2 to 4 letters with their merges."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    vocab = {character: index for index, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    pairs = [a + b for a, b in product(ascii_lowercase, repeat=2)]
    for left, right in (*product(ascii_lowercase, repeat=2), *product(pairs, ascii_lowercase), *product(pairs, pairs)):
        if len(vocab) == VOCAB:
            break
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": [f"{left} {right}" for left, right in merges]}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": by_bytes, "decoder": by_bytes, "model": model}
    (model_dir / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model_dir / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "hidden_size": 2048}))
    return model_dir


def schema(number: int, kind: str) -> str:
    """Returns a schema that is not complete within the requested tokens."""
    if kind == "text":
        return json.dumps({"type": "string", "minLength": 100_000 + number})
    names = [f"field{number}", "name", "tags"]
    item = {
        "type": "object",
        "properties": {
            names[0]: {"type": "integer", "minimum": 0, "maximum": 10_000},
            names[1]: {"type": "string", "minLength": 20, "maxLength": 60},
            names[2]: {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 5},
        },
        "required": names,
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": item, "minItems": 1000})


async def measure(model_dir: Path, rounds: int) -> None:
    """Prints one line for 1 stream and one for 16."""
    plan = even_plan("dummy", 8, STAGES, 8192)
    async with local_ring(plan, model_dir, {"cost_ms": str(COST_MS)}) as runners:
        for streams in (1, 16):
            figures: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            for kind in KINDS:
                await _round(runners, streams, kind, 32)  # imports the grammar library; paces are learned
            for _, kind in product(range(rounds), KINDS):
                figures[kind].append(await _round(runners, streams, kind, TOKENS))
            _show(streams, figures)


def _show(streams: int, figures: dict[str, list[tuple[float, float]]]) -> None:
    free = statistics.median(tokens for tokens, _ in figures["none"])
    for kind, rounds in figures.items():
        tokens, saved = (statistics.median(one[i] for one in rounds) for i in (0, 1))
        print(
            f"{streams:2} streams, {kind:7}: {tokens:6.1f} tokens/s ({100 * (tokens / free - 1):+5.1f} %), "
            f"{100 * saved:.0f} % of the tokens without a lap",
            flush=True,
        )


async def _round(runners: list[LocalRunner], streams: int, kind: str, tokens: int) -> tuple[float, float]:
    """Returns (tokens per second, share of the tokens without a lap) of this many concurrent streams."""
    saved = (await runners[-1].fresh_beat()).laps_saved
    async with runners[-1].driver() as ask:
        times = await asyncio.gather(*(_stream(ask, i, kind, tokens) for i in range(streams)))
        took_s = max(last for _, last in times) - statistics.median(first for first, _ in times)
    saved = (await runners[-1].fresh_beat()).laps_saved - saved
    return streams * tokens / took_s, saved / (streams * tokens)


async def _stream(ask: Ask, number: int, kind: str, tokens: int) -> tuple[float, float]:
    """Returns the times of the first and the last token."""
    request = ring_request(f"bench-{time.monotonic_ns()}-{number}", [1, 2, 3, number], tokens)
    if kind != "none":
        request = replace(request, grammar=GrammarSpec("json_schema", schema(number, kind)))
    received, first = 0, 0.0
    async for events in ask(request, DEADLINE_S):
        received += len(events)
        first = first or (time.perf_counter() if received else 0.0)
    assert received == tokens, f"{received} of {tokens} tokens came"
    return first, time.perf_counter()

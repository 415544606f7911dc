"""Measures what drafts gain and cost a ring: `python -m tools.bench drafts`.

A ring of dummy stages, each a process of its own, answers with and without drafts, in turns. A stage takes --step-ms
for a frame and --token-ms for each further token of a row; --hop-ms is the delay of a link. The drafter is right with
each probability in turn. A figure is the median, over the turns, of tokens a second with drafts divided by those
without. With --real, SmolLM2-135M-Instruct answers over --stages llama.cpp stages, one core each, with drafts by
suffix: it repeats a text, and chats.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from exo_mesh.cli.bench.local_ring import LocalRunner, even_plan, local_ring, plan_with_cuts, ring_request
from exo_mesh.domain.footprint import POOL_TOKENS
from exo_mesh.domain.request import GenerateRequest, TokenEvent
from exo_mesh.errors import EngineError
from exo_mesh.weights.store import ModelStore
from exo_mesh.wire.driver_connection import Ask
from tools.real_model import LAYERS, MISSING, NAME, shipped_text, weights_file

DEADLINE_S = 300.0
SETTLE_TOKENS = 96
"""Tokens before the first turn, from which paces are learned."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("drafts", help="what drafts gain and cost a ring", description=__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=10.0, help="of a frame at each stage (default 10)")
    parser.add_argument("--token-ms", type=float, default=2.0, help="of each further token of a row (default 2)")
    parser.add_argument("--hop-ms", type=float, default=0.0, help="delay of each link (default 0)")
    parser.add_argument("--right", type=float, nargs="+", default=[0.95, 0.8, 0.6, 0.3], metavar="P")
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--real", action="store_true", help="a real model, whose drafts are by suffix")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        if args.real:
            asyncio.run(measure_real(Path(scratch), args))
            return 0
        (Path(scratch) / "config.json").write_text(json.dumps({"vocab_size": 1000, "hidden_size": 512}))
        for right in args.right:
            asyncio.run(measure(Path(scratch), right, args))
    return 0


async def measure(model_dir: Path, right: float, args: argparse.Namespace) -> None:
    """Prints one line for each number of streams."""
    costs = {"cost_ms": args.step_ms, "token_cost_ms": args.token_ms, "draft_right": right}
    options = {name: str(value) for name, value in costs.items()}
    plan = even_plan("dummy", 2 * args.stages, args.stages, 8192)
    async with contextlib.AsyncExitStack() as stack:

        async def relay(endpoint: str) -> str:
            return await stack.enter_async_context(_delayed(endpoint, args.hop_ms / 1000))

        links = relay if args.hop_ms else None
        runners = await stack.enter_async_context(local_ring(plan, model_dir, options, draft="auto", relay=links))
        for streams in args.streams:
            await _turn(runners, streams, SETTLE_TOKENS, drafts=False)
            await _turn(runners, streams, SETTLE_TOKENS, drafts=True)
            speeds: dict[bool, list[float]] = {False: [], True: []}
            shares = []
            for _ in range(args.turns):
                for drafts in speeds:
                    speed, share = await _turn(runners, streams, args.tokens, drafts=drafts)
                    speeds[drafts].append(speed)
                    shares += [share] * drafts
            _show(right, streams, speeds, shares)


async def measure_real(scratch: Path, args: argparse.Namespace) -> None:
    """Prints one line for each task, and whether all answers with drafts are equal to those without."""
    file = weights_file()
    if file is None:
        raise EngineError(MISSING)
    view = ModelStore((file.parent,), views_dir=scratch / "views").find(NAME)
    cuts = [LAYERS * index // args.stages for index in range(args.stages + 1)]
    plan = plan_with_cuts("llamacpp", cuts, 2048, POOL_TOKENS)
    cpus = sorted(os.sched_getaffinity(0))
    async with local_ring(plan, view, {"threads": "1"}, cpus, draft="suffix") as runners:
        for name, request in _tasks(view, args.tokens).items():
            speeds: dict[bool, list[float]] = {False: [], True: []}
            answers: set[tuple[int, ...]] = set()
            shares = []
            for turn in range(args.turns + 1):
                for drafts in speeds:
                    speed, share, ids = await _answer(runners, replace(request, drafts=drafts))
                    answers.add(ids)
                    if turn:  # paces are learned in the first
                        speeds[drafts].append(speed)
                        shares += [share] * drafts
            print(f"{name:7}", end=" ")
            _show(1.0, 1, speeds, shares)
            print(f"        {len(answers)} different answer(s) in {2 * args.turns + 2}")


def _tasks(view: Path, tokens: int) -> dict[str, GenerateRequest]:
    """A text that repeats what the prompt says, with one word changed where it begins, and an answer in a chat."""
    tokenizer = Tokenizer.from_file(str(view / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    text = ids(shipped_text())[40:340]
    chat = ids(
        "<|im_start|>user\nWhy is the sky blue, and why is it red in the evening?<|im_end|>\n<|im_start|>assistant\n"
    )
    return {
        "repeat": ring_request("repeat", [*text, *ids("\n\nOnce more:\n"), *text[:12]], min(tokens, len(text) - 12)),
        "chat": ring_request("chat", chat, tokens),
    }


async def _answer(runners: list[LocalRunner], request: GenerateRequest) -> tuple[float, float, tuple[int, ...]]:
    """Returns (tokens a second after the first, accepted part of the drafts, the answer)."""
    ids: list[int] = []
    first = last = 0.0
    skipped = accepted = rejected = 0
    async with runners[-1].driver() as ask:
        async for events in ask(replace(request, request_id=f"bench-{time.monotonic_ns()}"), DEADLINE_S):
            for event in events:
                assert isinstance(event, TokenEvent), event
                ids += [] if event.token_id is None else [event.token_id]
                accepted, rejected = event.accepted, event.rejected
            last = time.perf_counter()
            if ids and not first:
                first, skipped = last, len(ids)
    return (len(ids) - skipped) / (last - first), accepted / max(1, accepted + rejected), tuple(ids)


@contextlib.asynccontextmanager
async def _delayed(endpoint: str, delay_s: float) -> AsyncIterator[str]:
    """A relay to an endpoint that delivers all bytes after a delay, in either direction."""
    host, _, port = endpoint.rpartition(":")
    tasks: set[asyncio.Task[None]] = set()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        for source, target in ((reader, far_writer), (far_reader, writer)):
            tasks.add(asyncio.create_task(_pass_on(source, target, delay_s)))

    async with await asyncio.start_server(accepted, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in tasks:
            task.cancel()


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    while data := await source.read(1 << 16):
        loop.call_later(delay_s, target.write, data)


def _show(right: float, streams: int, speeds: dict[bool, list[float]], shares: list[float]) -> None:
    ratios = [on / off for off, on in zip(speeds[False], speeds[True], strict=True)]
    off, on = (statistics.median(speeds[drafts]) for drafts in (False, True))
    print(
        f"right {right:4.2f}, {streams:2} streams: {off:6.1f} tokens/s without, {on:6.1f} with drafts: "
        f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f}), "
        f"{100 * statistics.median(shares):.0f} % of the drafts accepted",
        flush=True,
    )


async def _turn(runners: list[LocalRunner], streams: int, tokens: int, *, drafts: bool) -> tuple[float, float]:
    """Returns (tokens a second, accepted part of all drafts) of this many concurrent streams."""
    before = await runners[-1].fresh_beat()
    async with runners[-1].driver() as ask:
        times = await asyncio.gather(*(_stream(ask, number, tokens, drafts=drafts) for number in range(streams)))
    took_s = max(last for _, last in times) - statistics.median(first for first, _ in times)
    after = await runners[-1].fresh_beat()
    accepted = sum(after.drafts_accepted) - sum(before.drafts_accepted)
    rejected = sum(after.drafts_rejected) - sum(before.drafts_rejected)
    return streams * tokens / took_s, accepted / max(1, accepted + rejected)


async def _stream(ask: Ask, number: int, tokens: int, *, drafts: bool) -> tuple[float, float]:
    """Returns the times of the first and the last token."""
    request = ring_request(f"bench-{time.monotonic_ns()}-{number}", [1, 2, 3, number], tokens)
    received, first = 0, 0.0
    async for events in ask(replace(request, drafts=drafts), DEADLINE_S):
        received += len(events)
        first = first or (time.perf_counter() if received else 0.0)
    assert received == tokens, f"{received} of {tokens} tokens came"
    return first, time.perf_counter()

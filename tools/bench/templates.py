"""Measures the time to render a chat template in a child process, as a node does, and in a thread.

`python -m tools.bench templates`

The template is ChatML, as in many models. Both ways alternate, so that other work on the machine affects both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import quantiles
from typing import Any

import uvloop

from exo_mesh.api.core.templates import TemplateRenderer
from exo_mesh.text.rendering import CompiledTemplate
from exo_mesh.text.template import ChatTemplate

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATIONS = {"1 message, 11 characters": (1, 11), "20 messages, 4 kB": (20, 200), "50 messages, 50 kB": (50, 1000)}


async def measure(rounds: int) -> None:
    """Prints the median and the 99th percentile of both ways, in milliseconds."""
    renderer = TemplateRenderer()
    found = ChatTemplate.found(TEMPLATE, "here")
    compiled = CompiledTemplate.compile(TEMPLATE, "here")
    began = time.perf_counter()
    await renderer.compile(found)
    print(f"start of a process and first compilation: {(time.perf_counter() - began) * 1e3:.0f} ms")
    with ThreadPoolExecutor(1) as pool:
        loop = asyncio.get_running_loop()
        for name, (count, length) in CONVERSATIONS.items():
            messages: list[dict[str, Any]] = [{"role": "user", "content": "x" * length}] * count
            ways: dict[str, Callable[[], Awaitable[str]]] = {
                "child": lambda messages=messages: renderer.render(found, messages),
                "thread": lambda messages=messages: loop.run_in_executor(pool, compiled.render, messages),
            }
            taken_ms: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(rounds):
                for way, render in ways.items():
                    began = time.perf_counter()
                    await render()
                    taken_ms[way].append((time.perf_counter() - began) * 1e3)
            shown = [f"{way} {summary(values)}" for way, values in taken_ms.items()]
            print(f"{name}: {', '.join(shown)}")
    await renderer.close()


def summary(values: list[float]) -> str:
    cuts = quantiles(values, n=100)
    return f"{cuts[49]:.3f} ms (p99 {cuts[98]:.3f})"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("templates", help="time to render a chat template", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    uvloop.run(measure(args.rounds))
    return 0

"""Measure the cost of a hop, with real frames over real runner processes, against a bare gRPC stream and plain TCP in
the same run.

The hop time is the lap of one decode row divided by the number of stages. It includes everything that a token needs:
encoding, gRPC, rows, ops and ballots, a null engine on each stage, sampling, and the answer stream to the caller.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from operator import truediv
from typing import Any, TypeVar

import msgspec

from exo_mesh.cli.bench.local_ring import NUM_IDS, LocalRunner, even_plan, local_ring, ring_request
from exo_mesh.cli.bench.raw_grpc import RawStream, raw_stream
from exo_mesh.cli.bench.result import BenchResult
from exo_mesh.cli.bench.tcp import bulk, echo_peer, ping_pong
from exo_mesh.domain.plan import Plan
from exo_mesh.rings.runner.scheduling.limits import PREFILL_CHUNK as CHUNK
from exo_mesh.security.certificates import issue
from exo_mesh.security.credentials import Credentials
from exo_mesh.security.secret import new_secret
from exo_mesh.weights.store import ModelStore

LAPS = 4096
"""Laps of a round: the driver computes its quantiles over exactly this many."""
BULK_BYTES = 512 * 1024 * 1024
"""Bytes of a round of long frames."""
FRAME_MIB = (4, 16)
"""Sizes of the long frames."""
ROUNDS = 5
CALL_DEADLINE_S = 120.0
MODEL = "exo-mesh-demo"

_Figures = TypeVar("_Figures")


def add_parser(subparsers: Any) -> None:
    """Adds the verb `exo-mesh bench ring`."""
    parser = subparsers.add_parser("ring", help="time of a hop against bare gRPC and plain TCP", description=__doc__)
    parser.add_argument("--peers", type=int, default=2, metavar="N", help="stages of the ring (default 2)")
    parser.add_argument("--engine", default="dummy", help="engine of the stages; only dummy computes nothing")
    parser.add_argument(
        "--payload", type=int, default=8192, metavar="BYTES", help="size of the activation of one token"
    )
    parser.add_argument("--tls", action="store_true", help="measure the ring over mutual TLS, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> BenchResult:
    """Measures the ring that the flags describe."""
    result = asyncio.run(measure(args.peers, args.engine, args.payload, with_tls=args.tls))
    return BenchResult(result, _text(result))


async def measure(peers: int, engine: str, payload_bytes: int, *, with_tls: bool = False) -> dict[str, Any]:
    """Measures the ring, a bare gRPC stream and TCP in turns; medians of ROUNDS rounds each. `tls`: the same over
    mutual TLS, with TCP rounds of its own."""
    result: dict[str, Any] = {
        "bench": "ring",
        "peers": peers,
        "engine": engine,
        "payload_bytes": payload_bytes,
        "rounds": ROUNDS,
        **await _ring_and_baselines(peers, engine, payload_bytes, None),
    }
    if with_tls:
        own = issue(new_secret(), "bench", ["127.0.0.1"], datetime.datetime.now(datetime.UTC))
        result["tls"] = await _ring_and_baselines(peers, engine, payload_bytes, own)
    return result


async def _ring_and_baselines(peers: int, engine: str, payload_bytes: int, tls: Credentials | None) -> dict[str, Any]:
    with raw_stream(_two_cpus(), tls) as raw:
        small = await _small(_Setting(peers, engine, payload_bytes, tls, raw))
        bulk = {
            f"{mib}_mib": await _bulk(_Setting(peers, engine, mib * 2**20 // CHUNK, tls, raw), mib * 2**20)
            for mib in FRAME_MIB
        }
    hop = small["ring"]["hop_us_p50"]
    return {
        **small,
        "ratio": round(hop / small["tcp"]["hop_us_p50"], 2),
        "grpc_ratio": round(hop / small["grpc"]["hop_us_p50"], 2),
        "bulk": bulk,
    }


class _Setting(msgspec.Struct, frozen=True):
    """What the rounds of one table have in common. payload_bytes: the activation of one token."""

    peers: int
    engine: str
    payload_bytes: int
    tls: Credentials | None
    raw: RawStream


async def _small(setting: _Setting) -> dict[str, dict[str, float]]:
    """Measures hop times: a stream of single decode rows against ping-pong over gRPC and TCP."""
    laps: list[float] = []
    hops: dict[str, list[tuple[float, float]]] = {"ring": [], "grpc": [], "tcp": []}

    async def ring_round(runners: list[LocalRunner]) -> None:
        elapsed = await _generate(runners, setting.tls, prompt=1, tokens=LAPS)
        beat = await runners[-1].fresh_beat()
        laps.append(LAPS / elapsed)
        hops["ring"].append((beat.lap_p50_s / setting.peers, beat.lap_p99_s / setting.peers))

    def baselines() -> None:
        hops["grpc"].append(setting.raw.ping_pong(setting.payload_bytes, LAPS))
        hops["tcp"].append(_on_tcp(lambda connection: ping_pong(connection, setting.payload_bytes, LAPS)))

    counted = await _interleaved(setting, ring_round, baselines)
    table = {
        name: {
            "hop_us_p50": _us([median for median, _ in rounds]),
            "hop_us_p99": _us([tail for _, tail in rounds]),
            "laps_per_s": round(0.5 / statistics.median(median for median, _ in rounds), 1),
        }
        for name, rounds in hops.items()
    }
    table["ring"] |= {"laps_per_s": round(statistics.median(laps), 1), "frames_counted": counted}
    return table


async def _bulk(setting: _Setting, frame_bytes: int) -> dict[str, float]:
    """Measures bandwidth: prefill chunks whose activations have frame_bytes each, against gRPC and TCP one way. A ratio
    is the median of the ratios of single rounds."""
    frames = BULK_BYTES // frame_bytes
    rates: dict[str, list[float]] = {"ring": [], "grpc": [], "tcp": []}

    async def ring_round(runners: list[LocalRunner]) -> None:
        elapsed = await _generate(runners, setting.tls, prompt=CHUNK * frames + 1, tokens=1)
        rates["ring"].append(frame_bytes * frames / elapsed)

    def baselines() -> None:
        rates["grpc"].append(setting.raw.bulk(frame_bytes, frames))
        rates["tcp"].append(_on_tcp(lambda connection: bulk(connection, frame_bytes, frames)))

    await _interleaved(setting, ring_round, baselines)
    return {
        **{f"{name}_gb_per_s": _gb(rounds) for name, rounds in rates.items()},
        **{
            f"{name}_ratio": round(statistics.median(map(truediv, rates["ring"], rates[name])), 2)
            for name in ("grpc", "tcp")
        },
    }


async def _interleaved(
    setting: _Setting, ring_round: Callable[[list[LocalRunner]], Awaitable[None]], baselines: Callable[[], None]
) -> int:
    """Alternates rounds of all after one warm-up of the ring; returns the number of frames that the runners counted.
    The baselines block while the ring is idle."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    directory = ModelStore(()).find(MODEL)
    options = {"payload_bytes": str(setting.payload_bytes)} if setting.engine == "dummy" else {}
    async with local_ring(ring_plan(setting.peers, setting.engine), directory, options, cpus, setting.tls) as runners:
        await _generate(runners, setting.tls, prompt=CHUNK + 1, tokens=64)
        for _ in range(ROUNDS):
            await ring_round(runners)
            baselines()
        beats = [await runner.fresh_beat() for runner in runners]
        return sum(beat.frames_in for beat in beats)


def ring_plan(peers: int, engine: str) -> Plan:
    """The plan of a ring of so many stages, without tensor groups."""
    return even_plan(engine, max(peers, 8), peers, 2 * CHUNK * BULK_BYTES // (min(FRAME_MIB) * 2**20))


async def _generate(runners: list[LocalRunner], tls: Credentials | None, prompt: int, tokens: int) -> float:
    """Runs one request on the ring; returns the seconds from the call to its last token."""
    prompt_ids = [index % NUM_IDS for index in range(prompt)]
    request = ring_request(f"bench-{time.monotonic_ns()}", prompt_ids, tokens)
    start, received = time.perf_counter(), 0
    async with runners[-1].driver(tls) as ask:
        async for events in ask(request, CALL_DEADLINE_S):
            received += len(events)
        elapsed = time.perf_counter() - start
    assert received == tokens, f"{received} of {tokens} tokens came"
    return elapsed


def _on_tcp(measure: Callable[[socket.socket], _Figures]) -> _Figures:
    with echo_peer(_two_cpus()) as connection:
        return measure(connection)


def _two_cpus() -> tuple[int, int] | None:
    """The cores of both ends of a baseline: the cores of the first two stages; None where there is only one core."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return (cpus[0], cpus[-1]) if len(cpus) > 1 else None


def _us(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


def _gb(bytes_per_s: list[float]) -> float:
    return round(statistics.median(bytes_per_s) / 1e9, 2)


def _text(result: dict[str, Any]) -> str:
    head = f"{result['peers']} stages, {result['payload_bytes']} bytes a token, medians of {result['rounds']} rounds"
    tls = ["over mutual TLS", _figures(result["tls"])] if "tls" in result else []
    return "\n".join([head, _figures(result), *tls])


def _figures(result: dict[str, Any]) -> str:
    ring, raw, tcp = result["ring"], result["grpc"], result["tcp"]
    return "\n".join(
        [
            f"{'':12}{'ring':>10}{'gRPC':>12}{'ratio':>7}{'TCP':>12}{'ratio':>7}",
            f"  hop p50   {ring['hop_us_p50']:10.1f}{raw['hop_us_p50']:12.1f}{result['grpc_ratio']:7.2f}"
            f"{tcp['hop_us_p50']:12.1f}{result['ratio']:7.2f}  us",
            f"  hop p99   {ring['hop_us_p99']:10.1f}{raw['hop_us_p99']:12.1f}{tcp['hop_us_p99']:19.1f}         us",
            f"  laps/s    {ring['laps_per_s']:10.1f}{raw['laps_per_s']:12.1f}{tcp['laps_per_s']:19.1f}",
            *(
                f"  {name.replace('_mib', ' MiB'):10}{rates['ring_gb_per_s']:10.2f}{rates['grpc_gb_per_s']:12.2f}"
                f"{rates['grpc_ratio']:7.2f}{rates['tcp_gb_per_s']:12.2f}{rates['tcp_ratio']:7.2f}  GB/s"
                for name, rates in result["bulk"].items()
            ),
        ]
    )

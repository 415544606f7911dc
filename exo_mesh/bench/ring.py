"""Measure the cost of a hop, with real frames over real runner processes, against plain TCP in the same run.

The hop time is the lap of one decode row divided by the number of stages. It includes everything that a token needs:
encoding, gRPC, rows, ops and ballots, a null engine on each stage, sampling, and the answer stream to the caller.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

from exo_mesh.bench.local_ring import LocalRunner, local_ring
from exo_mesh.bench.result import BenchResult
from exo_mesh.bench.tcp import bulk, echo_peer, ping_pong
from exo_mesh.domain.footprint import POOL_TOKENS
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.shard import Shard
from exo_mesh.errors import error_from_code
from exo_mesh.proto import driver_pb2, driver_pb2_grpc
from exo_mesh.runner.scheduler import PREFILL_CHUNK as CHUNK
from exo_mesh.security.certificates import issue
from exo_mesh.security.credentials import Credentials
from exo_mesh.security.secret import new_secret
from exo_mesh.transport.channels import open_channel
from exo_mesh.transport.plan_codec import ballot_to_proto
from exo_mesh.weights.store import ModelStore

LAPS = 4096
"""Laps of a round: the driver computes its quantiles over exactly this many."""
BULK_BYTES = 16 * 1024 * 1024
BULK_FRAMES = 32
ROUNDS = 5
CALL_DEADLINE_S = 120.0
MODEL = "exo-mesh-demo"


def add_parser(subparsers: Any) -> None:
    """Adds the verb `exo-mesh bench ring`."""
    parser = subparsers.add_parser("ring", help="time of a hop against plain TCP", description=__doc__)
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
    """Measures the ring and TCP in turns; medians of ROUNDS rounds each. `tls`: the same over mutual TLS, with TCP
    rounds of its own."""
    result: dict[str, Any] = {
        "bench": "ring",
        "peers": peers,
        "engine": engine,
        "payload_bytes": payload_bytes,
        "rounds": ROUNDS,
        **await _ring_and_tcp(peers, engine, payload_bytes, None),
    }
    if with_tls:
        own = issue(new_secret(), "bench", ["127.0.0.1"], datetime.datetime.now(datetime.UTC))
        result["tls"] = await _ring_and_tcp(peers, engine, payload_bytes, own)
    return result


async def _ring_and_tcp(peers: int, engine: str, payload_bytes: int, tls: Credentials | None) -> dict[str, Any]:
    small = await _small(peers, engine, payload_bytes, tls)
    large = await _large(peers, engine, tls)
    return {
        "ring": {**small["ring"], **large["ring"]},
        "tcp": {**small["tcp"], **large["tcp"]},
        "ratio": round(small["ring"]["hop_us_p50"] / small["tcp"]["hop_us_p50"], 2),
        "bulk_ratio": round(large["ring"]["gb_per_s"] / large["tcp"]["gb_per_s"], 2),
    }


async def _small(peers: int, engine: str, payload_bytes: int, tls: Credentials | None) -> dict[str, dict[str, float]]:
    """Measures hop times: a stream of single decode rows against TCP ping-pong."""
    laps: list[float] = []
    p50: list[float] = []
    p99: list[float] = []
    tcp: list[tuple[float, float]] = []

    async def ring_round(runners: list[LocalRunner]) -> None:
        elapsed = await _generate(runners, tls, prompt=1, tokens=LAPS)
        beat = await runners[-1].fresh_beat()
        laps.append(LAPS / elapsed)
        p50.append(beat.lap_p50_s / peers)
        p99.append(beat.lap_p99_s / peers)

    async def tcp_round() -> None:
        tcp.append(await _on_tcp(lambda connection: ping_pong(connection, payload_bytes, LAPS)))

    counted = await _interleaved(peers, engine, payload_bytes, tls, ring_round, tcp_round)
    return {
        "ring": {
            "hop_us_p50": _us(p50),
            "hop_us_p99": _us(p99),
            "laps_per_s": round(statistics.median(laps), 1),
            "frames_counted": counted,
        },
        "tcp": {
            "hop_us_p50": _us([median for median, _ in tcp]),
            "hop_us_p99": _us([tail for _, tail in tcp]),
            "laps_per_s": round(0.5 / statistics.median(median for median, _ in tcp), 1),
        },
    }


async def _large(peers: int, engine: str, tls: Credentials | None) -> dict[str, dict[str, float]]:
    """Measures bandwidth: prefill chunks whose activations have BULK_BYTES each, against one-way TCP."""
    ring: list[float] = []
    tcp: list[float] = []

    async def ring_round(runners: list[LocalRunner]) -> None:
        elapsed = await _generate(runners, tls, prompt=CHUNK * BULK_FRAMES + 1, tokens=1)
        ring.append(BULK_BYTES * BULK_FRAMES / elapsed)

    async def tcp_round() -> None:
        tcp.append(await _on_tcp(lambda connection: bulk(connection, BULK_BYTES, BULK_FRAMES)))

    await _interleaved(peers, engine, BULK_BYTES // CHUNK, tls, ring_round, tcp_round)
    return {"ring": {"gb_per_s": _gb(ring)}, "tcp": {"gb_per_s": _gb(tcp)}}


async def _interleaved(
    peers: int,
    engine: str,
    payload_bytes: int,
    tls: Credentials | None,
    ring_round: Callable[[list[LocalRunner]], Awaitable[None]],
    tcp_round: Callable[[], Awaitable[None]],
) -> int:
    """Alternates rounds of both after one warm-up of the ring; returns the number of frames that the runners
    counted."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    directory = ModelStore(()).find(MODEL)
    options = {"payload_bytes": str(payload_bytes)} if engine == "dummy" else {}
    async with local_ring(_plan(peers, engine), directory, options, cpus, tls) as runners:
        await _generate(runners, tls, prompt=CHUNK + 1, tokens=64)
        for _ in range(ROUNDS):
            await ring_round(runners)
            await tcp_round()
        beats = [await runner.fresh_beat() for runner in runners]
        return sum(beat.frames_in for beat in beats)


def _plan(peers: int, engine: str) -> Plan:
    layers, limit = max(peers, 8), 2 * CHUNK * BULK_FRAMES
    cuts = [layers * index // peers for index in range(peers + 1)]
    stages = tuple(
        StagePlan(f"bench{index}", engine, Shard(MODEL, start, stop, layers), 0)
        for index, (start, stop) in enumerate(pairwise(cuts))
    )
    return Plan("bench", Ballot(1, "bench"), MODEL, "", stages, limit, PlanInputs((), "memory", peers), POOL_TOKENS)


async def _generate(runners: list[LocalRunner], tls: Credentials | None, prompt: int, tokens: int) -> float:
    """Runs one request on the ring; returns the seconds from the call to its last token."""
    request = driver_pb2.GenerateRequest(
        instance_id="bench",
        ballot=ballot_to_proto(Ballot(1, "bench")),
        request_id=f"bench-{time.monotonic_ns()}",
        prompt_ids=[index % 200 for index in range(prompt)],
        max_tokens=tokens,
        ignore_eos=True,
        sampling=driver_pb2.Sampling(temperature=0, top_p=1, repetition_penalty=1),
    )
    async with open_channel(f"127.0.0.1:{runners[-1].port}", tls) as channel:
        stub = driver_pb2_grpc.DriverStub(channel)  # type: ignore[no-untyped-call]
        start, received = time.perf_counter(), 0
        async for message in stub.Generate(request, timeout=CALL_DEADLINE_S):
            if message.error_code:
                raise error_from_code(message.error_code, message.error_message)
            received += len(message.events)
        elapsed = time.perf_counter() - start
    assert received == tokens, f"{received} of {tokens} tokens came"
    return elapsed


async def _on_tcp(measure: Callable[[Any], Any]) -> Any:
    """Runs a blocking TCP measurement while the ring is idle."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with echo_peer((cpus[0], cpus[-1]) if len(cpus) > 1 else None) as connection:
        return measure(connection)


def _us(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


def _gb(bytes_per_s: list[float]) -> float:
    return round(statistics.median(bytes_per_s) / 1e9, 2)


def _text(result: dict[str, Any]) -> str:
    head = f"{result['peers']} stages, {result['payload_bytes']} bytes a token, medians of {result['rounds']} rounds"
    tls = ["over mutual TLS", _figures(result["tls"])] if "tls" in result else []
    return "\n".join([head, _figures(result), *tls])


def _figures(result: dict[str, Any]) -> str:
    ring, tcp = result["ring"], result["tcp"]
    return "\n".join(
        [
            f"  hop   p50 {ring['hop_us_p50']:8.1f} us   TCP {tcp['hop_us_p50']:8.1f} us   ratio {result['ratio']}",
            f"  hop   p99 {ring['hop_us_p99']:8.1f} us   TCP {tcp['hop_us_p99']:8.1f} us",
            f"  laps/s    {ring['laps_per_s']:8.1f}      TCP {tcp['laps_per_s']:8.1f}",
            f"  16 MiB    {ring['gb_per_s']:8.2f} GB/s TCP {tcp['gb_per_s']:8.2f} GB/s ratio {result['bulk_ratio']}",
        ]
    )

"""A long prompt that enters a ring over slow links: nothing stands still, chunks shrink, and streams keep their beat.

Real nodes and runners on hosts of their own; the uplink of each host has a token bucket (tc tbf). A token takes 8 KiB
from stage to stage, as of a 4,096-wide model in bfloat16. `pytest -m slow -s tests/links` prints what was measured, and
docs/measurements/slow-links.md has it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exo_mesh.rings.runner.scheduling.limits import PREFILL_BUDGET_S
from exo_mesh.rings.runner.scheduling.pace import CHUNKS
from tests.mesh.discovery.netns import Host, Network, measured, why_not
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.dummy_oracle import dummy_text

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
MODEL = "long"
PAYLOAD_BYTES = 8192
PROMPT = 3000
STREAMS = 4
SETTLED = 100
"""Tokens that each stream has before the long prompt enters: a ring that is in use, and enough gaps to see what else
goes on on this machine."""
RATES_MBIT = (10, 100, 1000)


@dataclass(frozen=True)
class Measured:
    """Of one run. Seconds; gaps between the tokens of the streams, before and while the long prompt entered."""

    chunks: Sequence[int]
    ttft_s: float
    gaps_before_s: Sequence[float]
    gaps_s: Sequence[float]

    @property
    def chunk(self) -> float:
        """The usual size; the last one is what is left."""
        return statistics.median(self.chunks[:-1])

    def p99(self, gaps: Sequence[float]) -> float:
        return float(np.quantile(gaps, 0.99))

    def row(self, rate: int, stages: int) -> str:
        told = [self.p99(self.gaps_before_s), statistics.median(self.gaps_s), self.p99(self.gaps_s), max(self.gaps_s)]
        gaps = ", ".join(f"{1000 * gap:.0f}" for gap in told)
        return f"| {rate} | {stages} | {self.chunk:.0f} | {gaps} ms | {self.ttft_s:.1f} s |"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_checkpoint(folder / MODEL, TinyModel(layers=6, hidden=16, intermediate=32, context=200_000))
    return folder


@pytest.mark.parametrize("stages", [2, 3])
def test_chunks_follow_the_slowest_link_and_streams_keep_their_beat(tmp_path: Path, models: Path, stages: int) -> None:
    if reason := why_not():
        pytest.skip(reason)
    found = {rate: over_links_of(rate, stages, tmp_path / str(rate), models) for rate in RATES_MBIT}
    for rate, run in found.items():
        print(run.row(rate, stages))
        limit_s = PREFILL_BUDGET_S + max(run.gaps_before_s)
        assert run.p99(run.gaps_s) <= limit_s, f"{rate} Mbit/s: a token's own lap and one chunk, no more"
        transfer_s = run.chunk * PAYLOAD_BYTES * 8 / (rate * 1e6) * (stages - 1)
        assert transfer_s <= PREFILL_BUDGET_S or run.chunk == CHUNKS[0], f"{rate} Mbit/s: chunks of {run.chunk}"
    sizes = [found[rate].chunk for rate in RATES_MBIT]
    assert sizes == sorted(set(sizes)), f"the faster the links, the larger the chunks: {sizes}"


def test_who_comes_while_a_long_prompt_is_alone_does_not_wait_for_its_end(tmp_path: Path, models: Path) -> None:
    """Over the slowest links; there is nobody for whom chunks would have to be small."""
    if reason := why_not():
        pytest.skip(reason)
    with ring_over(RATES_MBIT[0], 2, tmp_path, models) as entry:
        result = ask(entry, [body("x" * PROMPT, 8)], 0, body("hello", 20), to_the_end=True)
    long, late = result["streams"][0], result["late"]
    assert not long["error"] and not late["error"]
    assert long["text"] == dummy_text(models / MODEL, "x" * PROMPT, 8)
    assert late["text"] == dummy_text(models / MODEL, "hello", 20)
    waited_s, whole_s = late["came"][0] - late["sent"], long["came"][0] - long["sent"]
    print(f"a short prompt waits {waited_s:.1f} s beside a long one that takes {whole_s:.1f} s")
    assert late["came"][-1] < long["came"][0], "it was answered before the long prompt had entered"


def over_links_of(rate_mbit: int, stages: int, folder: Path, models: Path) -> Measured:
    """The long prompt among streams, over links of this rate."""
    folder.mkdir()
    with ring_over(rate_mbit, stages, folder, models) as entry:
        streams = [body(prompt_of(number), 20_000) for number in range(STREAMS)]
        return judged(ask(entry, streams, SETTLED, body("x" * PROMPT, 8)), models / MODEL)


@contextmanager
def ring_over(rate_mbit: int, stages: int, folder: Path, models: Path) -> Iterator[Host]:
    """The entry host of a mesh whose hosts send at most so much, with a ring over all of them."""
    net = Network(folder)
    try:
        hosts = net.build(stages, 1)
        for host in hosts:
            throttle(host, rate_mbit)
            host.start("--models-dir", str(models), "--engine-option", f"cost_ms=5,payload_bytes={PAYLOAD_BYTES}",
                       "--discovery", "udp")  # fmt: skip
        measured(lambda: all(host.is_up() for host in hosts), 120, f"{stages} nodes up")
        measured(lambda: all(len(host.sees()) == stages for host in hosts), 30, "they see each other")
        placed = hosts[0].post("/instance", {"model": MODEL, "min_peers": stages, "context_limit": 100_000})
        assert "error" not in placed and len(placed["stages"]) == stages, placed
        yield hosts[0]
    finally:
        for host in net.hosts:
            print(*(line for line in host.log().splitlines() if "warning" in line or "error" in line), sep="\n")
        net.delete()


def throttle(host: Host, rate_mbit: int) -> None:
    """What this host sends has a token bucket of 10 ms (at least some packets), before it a queue of 100 ms."""
    burst = max(32_000, rate_mbit * 1_000_000 // 8 // 100)
    bucket = ["tbf", "rate", f"{rate_mbit}mbit", "burst", str(burst), "latency", "100ms"]
    made = subprocess.run(["tc", "-n", host.ns, "qdisc", "add", "dev", "eth0", "root", *bucket],
                          check=False, capture_output=True, text=True)  # fmt: skip
    if made.returncode:
        pytest.skip(f"no token buckets here: {made.stderr.strip()}")


def ask(
    entry: Host, streams: list[dict[str, Any]], settled: int, late: dict[str, Any], *, to_the_end: bool = False
) -> dict[str, Any]:
    """The streams, and the late one once each has so many tokens, from the entry peer's own host; see asker.py."""
    wish = {"url": "http://127.0.0.1:52415", "trace_id": "a" * 32, "streams": streams, "settled": settled}
    command = [sys.executable, "-m", "tests.links.asker"]
    child = entry.popen(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    answer, _ = child.communicate(json.dumps({**wish, "late": late, "to_the_end": to_the_end}) + "\n", timeout=300)
    result: dict[str, Any] = json.loads(answer)
    return result


def prompt_of(number: int) -> str:
    return f"question {number}"


def body(prompt: str, tokens: int) -> dict[str, Any]:
    wanted = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return {**wanted, "ignore_eos": True, "stream": True}


def judged(result: dict[str, Any], model_dir: Path) -> Measured:
    """Every text must be right, and nobody may have failed; then what it felt like."""
    streams, long = result["streams"], result["late"]
    assert not [one["error"] for one in (*streams, long) if one["error"]]
    assert result["trace"]["otherData"]["legs"] == 1, "the ring was lost on the way, and what follows is of another one"
    assert long["text"] == dummy_text(model_dir, "x" * PROMPT, 8)
    for number, stream in enumerate(streams):
        assert stream["text"] == dummy_text(model_dir, prompt_of(number), len(stream["text"]))
    spans = [event for event in result["trace"]["traceEvents"] if event.get("cat") == "compute"]
    chunks = {span["args"]["step"]: span["args"]["tokens"] for span in spans if span["name"].startswith("prefill")}
    assert sum(chunks.values()) >= PROMPT - 1
    first = long["came"][0]
    return Measured(
        list(chunks.values()),
        first - long["sent"],
        gaps([[at for at in one["came"] if at <= long["sent"]] for one in streams]),
        gaps([[at for at in one["came"] if long["sent"] <= at <= first] for one in streams]),
    )


def gaps(times: Sequence[Sequence[float]]) -> list[float]:
    return [gap for one in times for gap in np.diff(one).tolist()]

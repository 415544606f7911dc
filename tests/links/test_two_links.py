"""Two peers with a fast cable and a slow Wi-Fi between them: the cable carries the ring, and the Wi-Fi takes over.

Real nodes and runners on hosts of their own. Both networks have a token bucket (tc tbf) at each host; the slow one also
a relay that delays each frame, because not every kernel has netem. `pytest -m slow -s tests/links` prints what was
measured, and docs/measurements/slow-links.md has it.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.links.test_throttled import MODEL, PAYLOAD_BYTES, ROOT, body
from tests.mesh.discovery.netns import Host, Network, ip, measured, why_not
from tests.support.checkpoints import TinyModel, write_checkpoint
from tests.support.dummy_oracle import dummy_text

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(600)]

CABLE, WIFI = 0, 1
RATES_MBIT = {CABLE: 1000, WIFI: 20}
DELAY_S = 0.005
"""One way over the Wi-Fi."""
TOKENS = 400
BEFORE = 150
"""Tokens of the stream before the cable is pulled."""


@dataclass
class Stream:
    """A streamed request that runs in a child."""

    child: subprocess.Popen[str]
    came: list[float] = field(default_factory=list)
    text: str = ""

    def read(self, tokens: int) -> None:
        """Until so many tokens have come, or the stream ends."""
        assert self.child.stdout
        while len(self.text) < tokens and (line := self.child.stdout.readline()):
            event = json.loads(line)
            assert not event["error"], event
            self.text += event["text"]
            self.came += [event["at"]] * len(event["text"])

    def gaps_ms(self, start: int = 0, stop: int | None = None) -> Sequence[float]:
        return [1000 * (after - before) for before, after in itertools.pairwise(self.came[start:stop])]


def test_the_cable_carries_the_ring_and_the_wifi_takes_over_when_it_is_pulled(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    model = tmp_path / "models" / MODEL
    write_checkpoint(model, TinyModel(layers=6, hidden=16, intermediate=32, context=200_000))
    with two_links(tmp_path) as (one, two):
        before = sent_bytes(one, two)
        stream = asked(one, "over the cable")
        stream.read(TOKENS)
        carried = {number: sent - before[number] for number, sent in sent_bytes(one, two).items()}
        share = carried[CABLE] / (carried[CABLE] + carried[WIFI])
        beat_ms = statistics.median(stream.gaps_ms())
        print(f"{TOKENS} tokens, {beat_ms:.1f} ms each: {share:.1%} of {sum(carried.values()) / 1e6:.1f} MB by cable")
        assert stream.text == dummy_text(model, "over the cable", TOKENS)
        assert carried[CABLE] >= TOKENS * PAYLOAD_BYTES and share > 0.95

        pulled = asked(one, "the cable is pulled")
        pulled.read(BEFORE)
        before = sent_bytes(one, two)
        ip("-n", one.net.switch, "link", "set", two.port(CABLE), "down")
        pulled.read(TOKENS)
        carried = {number: sent - before[number] for number, sent in sent_bytes(one, two).items()}
        gaps = pulled.gaps_ms(BEFORE - 1)
        print(f"pulled: a pause of {max(gaps) / 1000:.2f} s, then {statistics.median(gaps):.1f} ms each over the Wi-Fi")
        assert pulled.text == dummy_text(model, "the cable is pulled", TOKENS), "nothing is lost or said twice"
        assert carried[WIFI] > (TOKENS - BEFORE) * PAYLOAD_BYTES / 2

        ip("-n", one.net.switch, "link", "set", two.port(CABLE), "up")
        time.sleep(10)
        before = sent_bytes(one, two)
        again = asked(one, "the cable is back")
        again.read(TOKENS)
        carried = {number: sent - before[number] for number, sent in sent_bytes(one, two).items()}
        share = carried[CABLE] / (carried[CABLE] + carried[WIFI])
        print(f"10 s after it is back: {statistics.median(again.gaps_ms()):.1f} ms each, {share:.0%} by cable")
        assert again.text == dummy_text(model, "the cable is back", TOKENS)


@contextmanager
def two_links(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts with both links, and a ring over both of them."""
    net = Network(folder)
    try:
        one, two = net.build(2, 2)
        delay(net, one, two)
        for host, number in itertools.product((one, two), RATES_MBIT):
            throttle(host, number)
        for host in (one, two):
            host.start("--models-dir", str(folder / "models"), "--discovery", "udp",
                       "--engine-option", f"cost_ms=2,payload_bytes={PAYLOAD_BYTES}")  # fmt: skip
        measured(lambda: one.is_up() and two.is_up(), 120, "two nodes up")
        measured(lambda: all(len(host.sees()) == 2 for host in (one, two)), 30, "they see each other")
        measured(lambda: all(len(works(host)) == 2 for host in (one, two)), 60, "both paths are measured")
        placed = one.post("/instance", {"model": MODEL, "min_peers": 2, "context_limit": 100_000})
        assert "error" not in placed and len(placed["stages"]) == 2, placed
        yield one, two
    finally:
        for host in net.hosts:
            print(*(line for line in host.log().splitlines() if "warning" in line or "error" in line), sep="\n")
        net.delete()


def works(host: Host) -> list[str]:
    """The measured paths of a host to the other one that work, by IPv4."""
    return [
        path["address"] for path in host.link().get("paths") or () if path["works"] and path["address"][:3] == "10."
    ]


def delay(net: Network, one: Host, two: Host) -> None:
    """The slow network is no bridge but a relay that takes its time."""
    ports = one.port(WIFI), two.port(WIFI)
    for port in ports:
        ip("-n", net.switch, "link", "set", port, "nomaster")
    for host in (one, two):
        name = f"eth{WIFI}"
        assert host.popen(sys.executable, "-m", "tests.links.delay", "--whole-frames", name, cwd=ROOT).wait(60) == 0
    command = ["ip", "netns", "exec", net.switch, sys.executable, "-m", "tests.links.delay", *ports, str(DELAY_S)]
    net.processes.append(subprocess.Popen(command, cwd=ROOT))


def throttle(host: Host, number: int) -> None:
    rate = RATES_MBIT[number]
    bucket = ["rate", f"{rate}mbit", "burst", str(max(32_000, rate * 1250)), "latency", "100ms"]
    made = subprocess.run(["tc", "-n", host.ns, "qdisc", "add", "dev", f"eth{number}", "root", "tbf", *bucket],
                          check=False, capture_output=True, text=True)  # fmt: skip
    if made.returncode:
        pytest.skip(f"no token buckets here: {made.stderr.strip()}")


def sent_bytes(*hosts: Host) -> dict[int, int]:
    """Bytes that the hosts have sent over each network."""
    return {number: sum(counter(host, f"eth{number}") for host in hosts) for number in RATES_MBIT}


def counter(host: Host, name: str) -> int:
    command = ["ip", "netns", "exec", host.ns, "cat", f"/sys/class/net/{name}/statistics/tx_bytes"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def asked(entry: Host, prompt: str) -> Stream:
    child = entry.popen(sys.executable, "-m", "tests.links.streamer", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                        text=True, cwd=ROOT)  # fmt: skip
    wish: dict[str, Any] = {"host": "127.0.0.1:52415", "body": body(prompt, TOKENS)}
    child.stdin.write(json.dumps(wish) + "\n")
    child.stdin.flush()
    return Stream(child)

"""Random faults under clients that never stop asking: checks for wrong text, leaks and hangs."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tools.faults.drawn import HOP_S
from tools.faults.faults import Fault, Struck, strike
from tools.faults.invariants import check_all
from tools.faults.keyed import KeyedClients
from tools.faults.load import Clients
from tools.faults.mesh import DETERMINISTIC, FaultMesh, Node, fault_mesh, wait_until

PEERS, ENTRIES, STREAMS = 4, 2, 4
"""Clients ask the first ENTRIES peers, whose nodes are never killed or stopped: they must see no error."""

KEYED = 2
"""Number of clients that ask the other peers, which fail repeatedly. They resend a request with its Idempotency-Key,
and must lose no answer."""

MAX_GROWTH_BYTES = 48 * 2**20
"""Most growth of one node over the soak, after its first quarter. A mesh of the demo model uses 110 MiB a node, and
Python's allocator may keep tens of MiB after a burst, so a leak of a kilobyte per request shows only in a long soak."""

MAX_FDS = 12
"""Most additional descriptors at the end, both counts without a request: connections to a peer that has just returned
exist twice for a moment."""


@dataclass(slots=True)
class Soak:
    """The result. rss: bytes of each entry node, sampled after each fault. fds: at start and end.

    keyed: answers of the clients with a key. troubles: the failures that they recovered from.
    """

    seed: int
    seconds: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    answers: int = 0
    keyed: int = 0
    troubles: dict[str, int] = field(default_factory=dict)
    longest_gap_s: float = 0.0
    rss: dict[int, list[int]] = field(default_factory=dict)
    fds: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def growth_bytes(self) -> int:
        """Growth of the node that grew most, from the median of its second quarter to that of its last one."""
        return max((_growth(readings) for readings in self.rss.values()), default=0)

    def describe(self) -> dict[str, Any]:
        fds = {f"n{number}": list(pair) for number, pair in self.fds.items()}
        return {
            "seed": self.seed,
            "seconds": round(self.seconds),
            "answers": self.answers,
            "keyed": self.keyed,
            "troubles": self.troubles,
            "faults": self.faults,
            "longest_gap_s": round(self.longest_gap_s, 2),
            "growth_bytes": self.growth_bytes,
            "fds": fds,
        }


def soak(root: Path, seconds: float, seed: int) -> Soak:
    """Runs the soak. Raises AssertionError at the first wrong text, client error, hang or leak."""
    rng, result = random.Random(seed), Soak(seed)
    with fault_mesh(root, PEERS, "--min-peers", "2", engine=DETERMINISTIC) as mesh:
        mesh.proxy.shape(*mesh.ways(), delay_s=HOP_S / 4)
        mesh.place(mesh.nodes)
        entries = mesh.nodes[:ENTRIES]
        before = {node.number: _fds(node) for node in entries}
        begin = time.monotonic()
        clients = Clients(entries, STREAMS, seed)
        keyed = KeyedClients(lambda: [node.url for node in mesh.nodes[ENTRIES:]], KEYED, seed)
        while (elapsed_s := time.monotonic() - begin) < seconds:
            clients.await_answers(rng.randrange(2, 6))
            fault = _strike_somewhere(mesh, rng, clients)
            keyed.await_answers(1)
            result.faults[fault.value] = result.faults.get(fault.value, 0) + 1
            for node in entries:
                result.rss.setdefault(node.number, []).append(psutil.Process(node.pid).memory_info().rss)
            print(f"{elapsed_s:6.0f} s: {fault.value}, {len(clients.answers)} answers", flush=True)
        clients.stop()
        keyed.stop()
        result.keyed, result.troubles = len(keyed.answers), dict(keyed.troubles)
        result.seconds = time.monotonic() - begin
        result.answers = len(clients.answers)
        result.longest_gap_s = max(answer.gap_s(answer.sent_at) for answer in clients.answers)
        check_all(mesh, clients.answers, 0.0, visible=False)
        wait_until(
            lambda: all(_fds(node) <= before[node.number] + MAX_FDS for node in entries), 60, "sockets are closed"
        )
        result.fds = {node.number: (before[node.number], _fds(node)) for node in entries}
    assert result.growth_bytes <= MAX_GROWTH_BYTES, f"a node grew by {result.growth_bytes >> 20} MiB"
    return result


def _strike_somewhere(mesh: FaultMesh, rng: random.Random, clients: Clients) -> Fault:
    """Injects one fault somewhere in the current ring; heals it after some answers have arrived despite it."""
    entry = mesh.nodes[0]
    wait_until(lambda: any(one["state"] == "ready" for one in entry.instances()), 60, "a ring is ready")
    ready = [one for one in entry.instances() if one["state"] == "ready"]
    if not ready:
        return _strike_somewhere(mesh, rng, clients)
    fault, instance = rng.choice(list(Fault)), rng.choice(ready)
    stages = range(len(instance["stages"]))
    spared = {node.id for node in mesh.nodes[:ENTRIES]} if fault.hits_the_node else set()
    able = [stage for stage in stages if instance["stages"][stage]["peer"] not in spared]
    if not able or (len(stages) == 1 and fault in (Fault.RESET, Fault.ONE_WAY_LOSS)):
        fault, able = Fault.RUNNER_KILL, list(stages)
    struck = _try(fault, mesh, instance, rng.choice(able))
    clients.await_answers(rng.randrange(2, 6))
    struck.heal()
    if struck.gone:
        mesh.start()
    else:
        mesh.await_joined()
    return fault


def _try(fault: Fault, mesh: FaultMesh, instance: dict[str, Any], victim: int) -> Struck:
    """Runs an action on the ring. The ring may have changed meanwhile; then there is nothing to do."""
    try:
        return strike(fault, mesh, instance, victim)
    except ProcessLookupError:
        return Struck("nobody")


def _fds(node: Node) -> int:
    return psutil.Process(node.pid).num_fds()


def _growth(readings: list[int]) -> int:
    quarter = len(readings) // 4
    if quarter < 2:
        return 0
    return int(median(readings[-quarter:]) - median(readings[quarter : 2 * quarter]))

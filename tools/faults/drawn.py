"""Random runs from a seed: one fault at one moment of one answer, in a mesh of two, three or four peers."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from exo_mesh.weights.store import ModelStore
from tools.faults.faults import Fault, Moment, Phase, Struck, strike
from tools.faults.invariants import check_all
from tools.faults.mesh import MODEL, FaultMesh, Node
from tools.faults.stream import Stream, counting

SIZES = (2, 3, 4)
NUM_CELLS = len(Fault) * len(Phase) * len(SIZES)
HOP_S = 0.008
"""Delay of every message between two nodes: a lap then takes tens of milliseconds, so that a fault can hit a moment in
it."""


NOTICED_S = 1.0
"""A pause after which the log must explain it. A stopped node whose ring goes on, or a hop that reconnects at once, may
leave only a counter."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run. victim: which stage. entry: the stage whose node the client asks. owner: the stage whose node placed the
    ring."""

    number: int
    fault: Fault
    phase: Phase
    peers: int
    victim: int
    entry: int
    owner: int

    @property
    def strikes_the_entry(self) -> bool:
        """Whether the client must ask another peer for the rest."""
        return self.fault.hits_the_node and self.victim == self.entry

    def __str__(self) -> str:
        where = f"stage {self.victim}; entry at {self.entry}, owner at {self.owner}"
        return f"{self.number}: {self.fault.value} at {self.phase.value}, {self.peers} peers, {where}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one run. Seconds are since the fault; None: did not happen. gap_s: the longest time without text
    after it. load: the load average of this machine."""

    case: str
    fault: str
    phase: str
    peers: int
    outcome: str
    late: bool
    detected_s: float | None
    gap_s: float
    warm_load_s: float
    bytes_loaded: int
    tokens_lost: int
    resumed: int
    redialled: int
    agreed_s: float
    freed_s: float
    load: float

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def cases(seed: int) -> Iterator[Case]:
    """Yields cases without end: every cell of fault x phase x size once in random order, then all again in another
    order."""
    rng = random.Random(seed)
    numbers = itertools.count(1)
    cells = list(itertools.product(Fault, Phase, SIZES))
    while True:
        rng.shuffle(cells)
        for fault, phase, peers in cells:
            entry = rng.randrange(peers)
            yield Case(next(numbers), fault, phase, peers, rng.randrange(peers), entry, rng.randrange(peers))


def play(mesh: FaultMesh, case: Case) -> Outcome:
    """Plays one run on a mesh of case.peers nodes, which is healthy before and after. Raises AssertionError if an
    invariant does not hold."""
    mesh.proxy.shape(*mesh.ways(), delay_s=HOP_S)
    entry = mesh.nodes[case.entry]
    before = mesh.place(mesh.nodes, at=mesh.nodes[case.owner])
    counted = [_signs(node) for node in mesh.nodes]
    first = 10 + case.number % 60
    question = counting(first, first + 30)
    moment = Moment(case.phase, mesh, before)
    # without a key a dead entry peer ends its requests, which tests/faults/test_entry_peer.py covers
    others = [node for node in mesh.nodes if node is not entry] if case.strikes_the_entry else []
    stream = Stream(entry, question, elsewhere=others)
    in_time = moment.wait(stream, question)
    struck_at = time.time()
    struck = strike(case.fault, mesh, before, case.victim)
    stream.await_end()
    after = _instances_now(mesh)
    _heal(mesh, struck)
    resumed, redialled = _moved(mesh, counted, struck)
    gap_s = stream.gap_s(struck_at)
    settled = check_all(mesh, [stream], struck_at, visible=gap_s > NOTICED_S)
    detected = [at for node in mesh.nodes for at, _ in node.signs(struck_at) if at <= stream.ended_at]
    return Outcome(
        case=str(case),
        fault=case.fault.value,
        phase=case.phase.value,
        peers=case.peers,
        outcome=stream.outcome,
        late=not in_time,
        detected_s=round(min(detected) - struck_at, 3) if detected else None,
        gap_s=round(gap_s, 3),
        warm_load_s=round(mesh.warm_load_s, 3),
        bytes_loaded=bytes_loaded([before], after),
        tokens_lost=len(question.answer) - len(stream.text),
        resumed=resumed,
        redialled=redialled,
        agreed_s=round(settled.agreed_s, 3),
        freed_s=round(settled.freed_s, 3),
        load=round(os.getloadavg()[0], 1),
    )


def bytes_loaded(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> int:
    """Weights of the stages of `after` whose process is new since `before`: they had to be loaded."""
    card = ModelStore(()).card(MODEL)
    had = {(stage["peer"], stage["pid"]) for one in before for stage in one["stages"]}
    new = [s for one in after for s in one["stages"] if s["pid"] and (s["peer"], s["pid"]) not in had]
    return sum(card.shard_bytes(*stage["layers"]) for stage in new)


def _instances_now(mesh: FaultMesh) -> list[dict[str, Any]]:
    """Returns the instances in the view of the first serving node."""
    return mesh.serving[0].instances()


def _heal(mesh: FaultMesh, struck: Struck) -> None:
    struck.heal()
    if struck.gone:
        mesh.start()
    else:
        mesh.await_joined()


def _signs(node: Node) -> tuple[float, float]:
    """Returns (resumed requests, reconnected streams and restarted runners)."""
    resumed = node.metric("exo_mesh_requests_resumed_total")
    return resumed, node.metric("exo_mesh_driver_redials_total")


def _moved(mesh: FaultMesh, counted: Sequence[tuple[float, float]], struck: Struck) -> tuple[int, int]:
    """Counts requests resumed, and streams reconnected, since `counted`, by nodes that were not killed."""
    now = [_signs(node) for node in mesh.nodes]
    moved = [
        (int(new[0] - old[0]), int(new[1] - old[1]))
        for node, new, old in zip(mesh.nodes, now, counted, strict=True)
        if node not in struck.gone
    ]
    return sum(resumed for resumed, _ in moved), sum(redialled for _, redialled in moved)

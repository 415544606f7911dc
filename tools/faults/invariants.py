"""What must be true after every fault, whatever it was (spec of the fault harness: docs/how-it-works/faults.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.faults.mesh import FaultMesh, Node, wait_until
from tools.faults.stream import Stream, counting

SETTLE_S = 60.0
"""A frozen runner is given 10 s, an orphan 30: what it took is recorded, this only bounds it."""

DIGEST_S = 30.0
"""A promise of 3 s on a quiet machine; what it took is recorded."""

UNTYPED = ("", "None", "internal_error", "broken_off")

NEXT = counting(7, 12)


@dataclass(frozen=True, slots=True)
class Settled:
    """Seconds from the check's begin."""

    agreed_s: float
    freed_s: float


def check_all(mesh: FaultMesh, streams: Sequence[Stream], since: float, *, visible: bool = True) -> Settled:
    """All invariants, after the fault was healed. Raises AssertionError with the first that does not hold.

    since: Unix time of the fault. visible: it must have left a line in some node's log.
    """
    for stream in streams:
        check_end(stream)
    agreed_s = wait_until(lambda: one_view(mesh.serving), DIGEST_S, "all live peers have one view")
    for node in mesh.serving:
        answer = Stream(node, NEXT)
        answer.await_end()
        assert answer.is_right, f"the next request at n{node.number}: {answer.outcome} {answer.text!r} {answer.message}"
    freed_s = wait_until(lambda: not leftovers(mesh), SETTLE_S, "all is freed") if leftovers(mesh) else 0.0
    if visible:
        assert any(node.signs(since) for node in mesh.nodes), "no log line tells of the fault"
    return Settled(agreed_s, freed_s)


def check_end(stream: Stream) -> None:
    """It ended once, and its text is right, or right as far as it goes with a typed error."""
    assert stream.ended.is_set() and stream.num_ends == 1, f"{stream.num_ends} ends"
    if stream.error:
        assert stream.error not in UNTYPED, f"no typed error: {stream.error}: {stream.message}"
        assert stream.question.answer.startswith(stream.text), f"wrong text: {stream.text!r}"
    else:
        assert stream.is_right, f"wrong answer: {stream.finish} {stream.text!r}"


def one_view(nodes: Sequence[Node]) -> bool:
    """Do all agree on peers and instances, and is nothing on its way?"""
    views = [node.state()["view"] for node in nodes]
    settled = all(instance["state"] == "ready" for view in views for instance in view["instances"])
    return settled and len({view["view_digest"] for view in views}) == 1


def leftovers(mesh: FaultMesh) -> list[str]:
    """What is there and should not be: sequences, leases, running requests, processes."""
    found = [f"process {pid} without a node" for pid in mesh.orphans()]
    for node in mesh.serving:
        found += [f"n{node.number}: {one}" for one in _leftovers_at(node)]
    return found


def _leftovers_at(node: Node) -> list[str]:
    state = node.state()
    stages = [stage for one in state["view"]["instances"] for stage in one["stages"] if stage["peer"] == node.id]
    held = sum(stage["reserve_bytes"] for stage in stages)
    reserved = state["telemetry"][node.id]["reserved_bytes"]
    found = [] if reserved == held else [f"{reserved} bytes reserved, plans hold {held}"]
    if sorted(stage["pid"] for stage in stages) != sorted(node.runners()):
        found.append(f"runners {node.runners()} for {len(stages)} stages")
    for name, beat in state["stages_here"].items():
        busy = {key: beat[key] for key in ("sequences", "running", "queued") if beat[key]}
        found += [f"{name}: {busy}"] if busy else []
    if running := node.metric("exo_mesh_requests_in_progress"):
        found.append(f"{running:g} requests run")
    return found

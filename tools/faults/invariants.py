"""The invariants that must hold after every fault (specified in docs/how-it-works/faults.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.faults.mesh import FaultMesh, Node, wait_until
from tools.faults.stream import Stream, counting

SETTLE_S = 60.0
"""Upper bound for frozen runners and orphans: a frozen runner is ended after 10 s, an orphan after 30. The real time is
recorded."""

DIGEST_S = 30.0
"""Upper bound for agreement: 3 s are promised on a quiet machine. The real time is recorded."""

UNTYPED = ("", "None", "internal_error", "broken_off")

NEXT = counting(7, 12)


@dataclass(frozen=True, slots=True)
class Settled:
    """Seconds since the start of the check."""

    agreed_s: float
    freed_s: float


def check_all(mesh: FaultMesh, streams: Sequence[Stream], since: float, *, visible: bool = True) -> Settled:
    """Checks all invariants after the fault was healed. Raises AssertionError with the first that does not hold.

    since: Unix time of the fault. visible: the fault must have left a line in some node's log.
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
        assert any(node.signs(since) for node in mesh.nodes), "no log line reports the fault"
    return Settled(agreed_s, freed_s)


def check_end(stream: Stream) -> None:
    """Checks that the request ended once, with the right text, or with a right beginning and a typed error."""
    assert stream.ended.is_set() and stream.num_ends == 1, f"{stream.num_ends} ends"
    if stream.error:
        assert stream.error not in UNTYPED, f"no typed error: {stream.error}: {stream.message}"
        assert stream.question.answer.startswith(stream.text), f"wrong text: {stream.text!r}"
    else:
        assert stream.is_right, f"wrong answer: {stream.finish} {stream.text!r}"


def one_view(nodes: Sequence[Node]) -> bool:
    """Whether all nodes agree on peers and instances, and no change is under way."""
    views = [node.state()["view"] for node in nodes]
    settled = all(instance["state"] == "ready" for view in views for instance in view["instances"])
    return settled and len({view["view_digest"] for view in views}) == 1


def leftovers(mesh: FaultMesh) -> list[str]:
    """Lists what should not exist: sequences, leases, running requests, processes."""
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

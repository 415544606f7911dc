"""The peer that took a request dies. Without a key nobody can ask for the rest, so all members of the ring end it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tools.faults.drawn import HOP_S
from tools.faults.invariants import check_all
from tools.faults.mesh import FaultMesh, Meshes, Node, wait_until
from tools.faults.record import Row, keep
from tools.faults.stream import Stream, counting

ENDS_WITHIN_S = 5.0
ENDLESS = {"ignore_eos": True, "max_tokens": 8000}


def kill(mesh: FaultMesh, entry: Node) -> None:
    """Its process: the system closes its connections."""
    entry.send(signal.SIGKILL)


def vanish(mesh: FaultMesh, entry: Node) -> None:
    """Its machine: nobody says that the connections are gone."""
    others = [node for node in mesh.nodes if node is not entry]
    mesh.proxy.hold(*(way for other in others for way in mesh.ways(entry, other)))
    entry.send(signal.SIGKILL)


def is_at_work(node: Node) -> bool:
    """Do its stages hold a sequence, or its driver a request?"""
    beats = node.state()["stages_here"].values()
    return any(beat[name] for beat in beats for name in ("sequences", "running", "queued"))


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("die", [kill, vanish])
@pytest.mark.parametrize("place", ["outside the ring", "first stage", "driver"])
def test_requests_without_a_key_end_on_all_members(
    die: Callable[[FaultMesh, Node], None], place: str, meshes: Meshes
) -> None:
    mesh = meshes.of(3)
    mesh.proxy.shape(*mesh.ways(), delay_s=HOP_S / 2)
    entry, *others = mesh.nodes
    ring = {"outside the ring": others, "first stage": [entry, *others], "driver": [*others, entry]}[place]
    mesh.place(ring, at=others[0])
    streams = [Stream(entry, counting(10, 60), **ENDLESS) for _ in range(3)]
    assert all(stream.await_text(10) for stream in streams)
    wait_until(lambda: all(is_at_work(node) for node in others), 10, "all members hold the sequences")
    since, begin = time.time(), time.monotonic()
    die(mesh, entry)
    wait_until(lambda: not any(is_at_work(node) for node in others), 30, "the members hold nothing any more")
    freed_s = time.monotonic() - begin
    mesh.proxy.release()
    mesh.start()
    check_all(mesh, [], since, visible=False)
    assert freed_s < ENDS_WITHIN_S
    test = "test_entry_peer.py::test_requests_without_a_key_end_on_all_members"
    note = f"{len(streams)} requests without a key; all members had freed them after {freed_s:.1f} s"
    keep(Row("F7", f"the entry peer, {place}: {die.__name__}", test, None, freed_s, None, 0, note))

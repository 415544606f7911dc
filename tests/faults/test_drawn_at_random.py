"""An answer that is drawn at random, with a seed: a replay goes on with the very tokens that would have come."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tools.faults.drawn import HOP_S
from tools.faults.invariants import check_all
from tools.faults.mesh import Meshes
from tools.faults.stream import Question, Stream

WILD = Question("Tell me something.", "", {"temperature": 1.5, "seed": 7, "ignore_eos": True, "max_tokens": 60})


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(0, id="the first stage", marks=pytest.mark.slow),
        pytest.param(2, id="the driver", marks=pytest.mark.slow),
    ],
)
def test_a_seeded_answer_is_the_same_after_the_death_of(meshes: Meshes, victim: int) -> None:
    mesh = meshes.of(3)
    mesh.proxy.shape(*mesh.ways(), delay_s=HOP_S)
    mesh.place(mesh.nodes)
    undisturbed = Stream(mesh.nodes[1], WILD)
    undisturbed.await_end()
    assert undisturbed.finish == "length"
    stream = Stream(mesh.nodes[1], WILD)
    assert stream.await_text(len(undisturbed.text) // 3)
    since = time.time()
    (now,) = mesh.nodes[1].instances()
    os.kill(now["stages"][victim]["pid"], signal.SIGKILL)
    stream.await_end()
    assert mesh.nodes[1].metric("exo_mesh_requests_resumed_total") >= 1
    assert (stream.text, stream.finish) == (undisturbed.text, "length")
    check_all(mesh, [], since)

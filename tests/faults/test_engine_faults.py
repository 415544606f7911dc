"""Engines that hang, die or differ: the request goes on, or ends with one clear error, and the mesh serves on."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from exo_mesh.errors import MeshError
from tools.faults.drawn import HOP_S, bytes_loaded
from tools.faults.invariants import check_all, leftovers
from tools.faults.load import Clients
from tools.faults.mesh import DETERMINISTIC, MODEL, FaultMesh, Meshes, Node, faulty, mesh_of, wait_until
from tools.faults.record import Row, keep
from tools.faults.stream import Stream, counting

HERE = "test_engine_faults.py"
QUESTION = counting(10, 40)
HANGS_S = 120.0
"""Between two tokens a request waits 30 s for a ring that is silent."""


def first_sign_s(mesh: FaultMesh, since: float) -> float | None:
    """Seconds from the fault to the first line in any log that tells of it."""
    return min((at - since for node in mesh.nodes for at, _ in node.signs(since)), default=None)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stubborn", [0, 1], ids=["", "that ignores SIGTERM"])
def test_an_engine_that_hangs_in_a_forward_is_ended_and_the_answer_goes_on(tmp_path: Path, stubborn: int) -> None:
    """Its process answers pings and sends heartbeats all the while: only its progress stands still."""
    mark = tmp_path / "hung"
    odd = faulty(hang_at=20, once=mark, stubborn=stubborn)
    with mesh_of(tmp_path, [DETERMINISTIC, odd, DETERMINISTIC]) as mesh:
        mesh.proxy.shape(*mesh.ways(), delay_s=HOP_S)
        before = mesh.place(mesh.nodes)
        stream = Stream(mesh.nodes[0], QUESTION)
        wait_until(mark.exists, 60, "the engine hangs")
        since = time.time()
        stream.await_end(HANGS_S)
        assert stream.is_right
        loaded, gap_s = bytes_loaded([before], mesh.nodes[0].instances()), stream.gap_s(since)
        detected_s = first_sign_s(mesh, since)
        check_all(mesh, [stream], since)
        fault = "the engine hangs in a forward" + (", SIGTERM ignored" if stubborn else "")
        test = f"{HERE}::test_an_engine_that_hangs_in_a_forward_is_ended_and_the_answer_goes_on"
        keep(Row("F2", fault, test, detected_s, gap_s, loaded, 0))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_healthy_prefill_that_takes_long_is_never_ended(tmp_path: Path) -> None:
    """One forward of the prompt takes longer than any silence that is suspicious between tokens."""
    slow = faulty(prefill_ms=400)  # 17 tokens: 6.8 s at each stage
    with mesh_of(tmp_path, [slow, slow]) as mesh:
        before = mesh.place(mesh.nodes)
        runners = [node.runners() for node in mesh.nodes]
        stream = Stream(mesh.nodes[0], QUESTION)
        stream.await_end()
        assert stream.is_right and stream.pieces[0][0] - stream.sent_at > 10.0
        assert mesh.nodes[1].instances() == [before], "the same ballot and processes"
        assert [node.runners() for node in mesh.nodes] == runners
        assert not mesh.nodes[0].metric("exo_mesh_requests_resumed_total")


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_an_engine_that_hangs_while_it_loads_is_given_up_and_others_serve(tmp_path: Path) -> None:
    with mesh_of(tmp_path, [DETERMINISTIC, faulty(hang_in_load=1), DETERMINISTIC]) as mesh:
        sound, odd, other = mesh.nodes
        since = time.time()
        wish = {"model": MODEL, "pins": {sound.id: [0, 4], odd.id: [4, 8]}}
        with pytest.raises(MeshError) as refused:
            sound.api.post("/instance", wish, 300)
        given_up_s = time.time() - since
        assert refused.value.code not in ("internal_error", "no_node")
        wait_until(lambda: not odd.runners(), 30, "the hanging process is gone")
        mesh.place([sound, other])
        stream = Stream(odd, QUESTION)
        stream.await_end()
        assert stream.is_right
        wait_until(lambda: not leftovers(mesh), 30, "all is freed")
        test = f"{HERE}::test_an_engine_that_hangs_while_it_loads_is_given_up_and_others_serve"
        keep(Row("F3", "the engine hangs while it loads", test, given_up_s, None, None, None, refused.value.code))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_runner_that_freezes_before_its_first_report_holds_up_nobody_else(tmp_path: Path) -> None:
    """Another ring over the same node serves on meanwhile."""
    with mesh_of(tmp_path, [DETERMINISTIC, DETERMINISTIC]) as mesh, ThreadPoolExecutor(1) as pool:
        here, there = mesh.nodes
        mesh.place([there], at=here)
        clients = Clients([here], 1, seed=2)
        clients.await_answers(1)
        known = there.runners()
        wish = {"model": MODEL, "pins": {here.id: [0, 4], there.id: [4, 8]}}
        placing = pool.submit(here.api.post, "/instance", wish, 200)
        (frozen,) = new_runners(there, known)
        os.kill(frozen, signal.SIGSTOP)
        since = time.time()
        clients.await_answers(5)
        wait_until(lambda: not psutil.pid_exists(frozen), 120, "the frozen process is ended")
        ended_s = time.time() - since
        clients.await_answers(2)
        outcome = "placed by a second process"
        try:
            placing.result(200)
        except MeshError as exc:
            outcome = exc.code
        clients.stop()
        check_all(mesh, clients.answers, since)
        test = f"{HERE}::test_a_runner_that_freezes_before_its_first_report_holds_up_nobody_else"
        keep(Row("F6", "a runner is stopped before its first report", test, ended_s, None, None, 0, outcome))


def new_runners(node: Node, known: list[int]) -> set[int]:
    """Pids of the runners that were not there before, as soon as there are any."""
    found: set[int] = set()

    def come() -> bool:
        found.update(set(node.runners()) - set(known))
        return bool(found)

    wait_until(come, 60, "a runner is started")
    return found


@pytest.mark.extended
def test_stages_that_differ_a_little_stay_in_step(tmp_path: Path) -> None:
    """Only the last stage draws, and every row says where it begins: noise changes what is said, and no more."""
    with mesh_of(tmp_path, [faulty(noise=1e-3)] * 3) as mesh:
        mesh.place(mesh.nodes)
        asked = [Stream(node, counting(10, 30), max_tokens=64) for node in mesh.nodes for _ in range(2)]
        for stream in asked:
            stream.await_end()
            assert stream.finish in ("stop", "length") and stream.num_ends == 1 and not stream.error
        wait_until(lambda: not leftovers(mesh), 30, "every stage has forgotten every sequence")
        assert all(len(node.instances()) == 1 for node in mesh.nodes)
        assert not any(node.metric("exo_mesh_requests_resumed_total") for node in mesh.nodes)


@pytest.mark.slow
def test_runners_end_with_a_killed_node_which_can_be_started_again_where_it_was(meshes: Meshes) -> None:
    mesh = meshes.of(3)
    mesh.place(mesh.nodes)
    doomed, runners = mesh.nodes[2], mesh.nodes[2].runners()
    assert runners
    doomed.send(signal.SIGKILL)
    took_s = wait_until(lambda: not any(psutil.pid_exists(pid) for pid in runners), 10, "its runners have ended")
    assert not mesh.orphans()
    since = time.time() - took_s
    mesh.start()
    assert doomed.ready["grpc_address"] == doomed.control, "nobody holds its port"
    check_all(mesh, [], since)
    test = f"{HERE}::test_runners_end_with_a_killed_node_which_can_be_started_again_where_it_was"
    keep(Row("F10", "a node is killed: its runner ends", test, took_s, None, None, None, "the same port serves again"))

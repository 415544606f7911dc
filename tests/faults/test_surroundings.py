"""The machine itself gives way: a full disk, a process killed for memory, a cable pulled. They need root on Linux."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.mesh.discovery.netns import Host, network
from tests.mesh.discovery.netns import why_not as why_no_namespaces
from tools.faults.drawn import HOP_S, bytes_loaded
from tools.faults.invariants import check_all
from tools.faults.mesh import FaultMesh, fault_mesh, wait_until
from tools.faults.record import Row, keep
from tools.faults.stream import Stream, counting

HERE = "test_surroundings.py"
QUESTION = counting(10, 40)
LONG = counting(0, 199)
DISK_BYTES = 16 * 2**20
GROUP_BYTES = 512 * 2**20
CGROUPS = Path("/sys/fs/cgroup/memory")

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="a file system can be mounted by root on Linux only"
)
needs_cgroups = pytest.mark.skipif(
    not (CGROUPS / "memory.limit_in_bytes").exists() or not os.access(CGROUPS, os.W_OK),
    reason="there is no writable memory control group of version 1",
)


@contextmanager
def small_disk(at: Path) -> Iterator[None]:
    at.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the room there is."""
    greedy = disk / "greedy"
    with greedy.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(2**16)):
                pass
        except OSError:
            pass
    assert os.statvfs(disk).f_bavail == 0
    return greedy


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_full_disk_stops_no_answer_and_takes_no_request_away(tmp_path: Path) -> None:
    """The home of a node, its log included, is on the disk that is full: under an answer, and for the next ones."""
    mesh = FaultMesh(tmp_path)
    with small_disk(tmp_path / "n0"):
        try:
            full, other = mesh.add(), mesh.add()
            mesh.start()
            mesh.proxy.shape(*mesh.ways(), delay_s=HOP_S)
            before = mesh.place(mesh.nodes)
            stream = Stream(full, QUESTION)
            assert stream.await_text(10)
            since = time.time()
            greedy = fill(full.home)
            stream.await_end()
            assert stream.is_right
            os.kill(before["stages"][1]["pid"], signal.SIGKILL)  # and placing anew needs no room either
            answers = [Stream(node, QUESTION) for node in (full, other)]
            for answer in answers:
                answer.await_end()
                assert answer.is_right, answer.message
            reasons = [reason["code"] for reason in full.api.get("/health")["reasons"]]
            greedy.unlink()
            check_all(mesh, [stream, *answers], since)
        finally:
            mesh.close()
    note = f"health says {', '.join(reasons) or 'nothing of it'}"
    test = f"{HERE}::test_a_full_disk_stops_no_answer_and_takes_no_request_away"
    keep(Row("F16", "the disk of a node is full", test, None, stream.gap_s(since), 0, 0, note))


@contextmanager
def memory_group() -> Iterator[Path]:
    """A control group of GROUP_BYTES without a process."""
    group = CGROUPS / f"exo-mesh-faults-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(GROUP_BYTES))
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            move(int(pid), CGROUPS)
        group.rmdir()


def move(pid: int, group: Path) -> None:
    """From now on the kernel charges a process there."""
    with suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(str(pid))


@needs_root
@needs_cgroups
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_runner_that_the_kernel_kills_for_memory_is_replaced(tmp_path: Path) -> None:
    """Another process takes all that is left of their control group under a long answer."""
    with memory_group() as group, fault_mesh(tmp_path, 2) as mesh:
        entry, other = mesh.nodes
        mesh.proxy.shape(*mesh.ways(), delay_s=HOP_S)
        move(other.pid, group)  # its runners begin where it is
        before = mesh.place(mesh.nodes)
        move(other.pid, CGROUPS)
        victim = before["stages"][1]["pid"]
        stream = Stream(entry, LONG)
        assert stream.await_text(10)
        since = time.time()
        take_all_memory(group, victim)
        stream.await_end()
        assert stream.is_right
        assert "was killed by SIGKILL" in other.log
        loaded, gap_s = bytes_loaded([before], entry.instances()), stream.gap_s(since)
        detected = [at - since for node in mesh.nodes for at, _ in node.signs(since)]
        check_all(mesh, [stream], since)
    test = f"{HERE}::test_a_runner_that_the_kernel_kills_for_memory_is_replaced"
    keep(Row("F13", "a runner is killed by the OOM killer", test, min(detected), gap_s, loaded, 0))


def take_all_memory(group: Path, victim: int) -> None:
    """Until the kernel has killed the victim, which it prefers to the one that is greedy."""
    Path(f"/proc/{victim}/oom_score_adj").write_text("1000")
    greedy = subprocess.Popen([sys.executable, "-c", GREEDY], stdin=subprocess.PIPE, text=True)
    assert greedy.stdin is not None
    try:
        move(greedy.pid, group)
        greedy.stdin.write("begin\n")
        greedy.stdin.flush()
        wait_until(lambda: not is_there(victim), 60, "the kernel has killed it")
    finally:
        greedy.kill()
        greedy.wait()
        greedy.stdin.close()


GREEDY = """
import sys
sys.stdin.readline()
taken = []
while True:
    taken.append(bytearray(b"x" * 1_000_000))
"""


def is_there(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cable_that_is_pulled_costs_an_answer_nothing_but_time(tmp_path: Path) -> None:
    """Three hosts that are network namespaces; the interface of one goes down under an answer of another."""
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with network(tmp_path, 3) as hosts:
        for host in hosts:
            host.start()
        wait_until(lambda: all(host.is_up() for host in hosts), 120, "three nodes are up")
        wait_until(lambda: all(host.sees() == ["h1", "h2", "h3"] for host in hosts), 60, "they see each other")
        ids = [host.get("/state")["node_id"] for host in hosts]
        pins = {peer_id: [start, stop] for peer_id, (start, stop) in zip(ids, [(0, 3), (3, 6), (6, 8)], strict=True)}
        placed = hosts[0].post("/instance", {"model": "exo-mesh-demo", "pins": pins})
        assert "error" not in placed, placed
        asked = {"model": "exo-mesh-demo", "prompt": "to be continued", "max_tokens": 900, "temperature": 0}
        expected = text_of(hosts[0], asked)
        took_s = pulled_under(hosts, asked, expected)
        assert text_of(hosts[0], asked) == expected
    test = f"{HERE}::test_a_cable_that_is_pulled_costs_an_answer_nothing_but_time"
    keep(Row("F7", "the interface of a host goes down", test, None, took_s, None, 0, "with what the rest of it took"))


def text_of(host: Host, asked: dict[str, object]) -> str:
    reply = host.post("/v1/completions", asked)
    assert "error" not in reply, reply
    return str(reply["choices"][0]["text"])


def pulled_under(hosts: list[Host], asked: dict[str, object], expected: str) -> float:
    """Pull the cable of the last host while the first has an answer under way; seconds from then to its end."""
    ip = ("ip", "-n", hosts[0].net.switch, "link", "set", hosts[2].port(0), "down")
    frames = sum(beat["frames_in"] for beat in hosts[0].get("/state")["stages_here"].values())
    pulling = subprocess.Popen(
        [sys.executable, "-c", PULL, LOOK, hosts[0].ns, str(frames), *ip], stdout=subprocess.PIPE, text=True
    )
    assert text_of(hosts[0], asked) == expected
    done = time.time()
    out, _ = pulling.communicate(timeout=60)
    return done - float(out)


LOOK = """
import http.client
connection = http.client.HTTPConnection("127.0.0.1", 52415, timeout=5)
connection.request("GET", "/state")
print(connection.getresponse().read().decode())
"""

PULL = """
import json, subprocess, sys, time
look, namespace, frames, *command = sys.argv[1:]
end = time.time() + 30
while time.time() < end:
    inside = ["ip", "netns", "exec", namespace, sys.executable, "-c", look]
    state = json.loads(subprocess.run(inside, capture_output=True, text=True, check=True).stdout)
    if sum(beat["frames_in"] for beat in state["stages_here"].values()) > int(frames):
        break
print(time.time(), flush=True)
subprocess.run(command, check=True)
"""

"""Real nodes to attack, and their measurements during the attack."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import psutil

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import ChildNode, own_environ, start_node
from exo_mesh.cli.client.local_mesh import await_joined
from exo_mesh.security.secret import new_secret, write_new
from tools.bench.sides import hogs

MIB = 2**20
MODEL = "exo-mesh-demo"
CHAT = {
    "model": MODEL,
    "max_tokens": 4,
    "temperature": 0,
    "messages": [{"role": "user", "content": "Count from 7 to 9."}],
}
MAX_GROWTH = 1.5
NODE_LIMIT_BYTES = 3 * 2**30
"""Address space of a node and of each of its children: one that grows without a bound ends before this machine does."""

WATCH_S = 0.05
HOG_S = 2.0
PROBE_S = 10.0
"""An answer of /healthz that takes longer counts as missing."""


@dataclass(slots=True)
class Rig:
    """Nodes with the demo model over all of them. `secret` is empty in an open mesh.

    notes: what a target prints beside its line. harm: damage to others than the nodes. seed, first: the cases of a
    content target are numbered from `first`; each is drawn from the seed and its number.
    """

    nodes: list[ChildNode]
    secret: str
    namespace: str
    answer: str = ""
    notes: list[str] = field(default_factory=list)
    harm: list[str] = field(default_factory=list)
    seed: int = 0
    first: int = 0
    directory: Path = Path()

    @property
    def api(self) -> ApiClient:
        return self.api_of(0)

    def api_of(self, index: int) -> ApiClient:
        """Returns a client with the local token of a node, so that the node accepts changes."""
        return self.nodes[index].api

    @property
    def api_port(self) -> int:
        return _port(self.nodes[0].url)

    @property
    def control(self) -> str:
        return f"127.0.0.1:{_port(self.nodes[0].grpc_address)}"

    @property
    def files_port(self) -> int:
        """Returns the port where peers read the first node's files: its only listening port besides control and API."""
        listening = {
            connection.laddr.port
            for connection in psutil.Process(self.nodes[0].pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        (port,) = listening - {self.api_port, _port(self.control)}
        return int(port)

    def instance(self) -> dict[str, Any]:
        """Returns the demo model's instance as the first node sees it; places it over all nodes if necessary."""
        found = self.api.get("/state")["view"]["instances"]
        if not found or found[0]["state"] != "ready":
            self.api.post("/instance", {"model": MODEL, "min_peers": len(self.nodes)}, 60)
            found = self.api.get("/state")["view"]["instances"]
        instance: dict[str, Any] = found[0]
        return instance

    def ask(self) -> str:
        """Returns the demo model's answer, which is the same each time."""
        answer = self.api.post("/v1/chat/completions", CHAT, 60)
        return str(answer["choices"][0]["message"]["content"])

    def processes(self) -> list[psutil.Process]:
        """Returns the nodes' processes and their runners."""
        own = [psutil.Process(node.pid) for node in self.nodes if node.alive]
        return own + [child for process in own for child in process.children(recursive=True)]


@contextmanager
def running(
    directory: Path,
    num_nodes: int,
    flags: Sequence[str],
    *,
    closed: bool,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Rig]:
    """Starts nodes that know each other; stops them at the end. environ: further variables for the nodes."""
    secret, namespace = new_secret() if closed else "", f"fuzz-{os.getpid()}"
    base = ["--engine", "dummy", "--namespace", namespace, *flags]
    if closed:
        write_new(directory / "mesh.secret", secret)
        base += ["--secret-file", str(directory / "mesh.secret")]
    with ExitStack() as stack:
        rig = Rig([], secret, namespace, directory=directory)
        for index in range(num_nodes):
            peers = ["--bootstrap-peers", rig.nodes[0].grpc_address] if rig.nodes else []
            node = start_node(directory / f"n{index}", [*base, *peers], own_environ(**environ), without=["--discovery"])
            stack.callback(node.stop)
            limit_memory(node.pid)
            node.wait_ready(60)
            rig.nodes.append(node)
        await_joined(rig.nodes[:1], num_nodes)
        rig.instance()
        rig.answer = rig.ask()
        yield rig


def start_peer(rig: Rig, models: Path, *flags: str) -> ChildNode:
    """Starts a node that joins the nodes of an open rig and has these models; the caller stops it."""
    own = ["--engine", "dummy", "--namespace", rig.namespace, "--name", "evil", "--models-dir", str(models)]
    own += ["--bootstrap-peers", rig.nodes[0].grpc_address, *flags]
    peer = start_node(models.parent / f"{models.name}-home", own)
    limit_memory(peer.pid)
    peer.wait_ready(60)
    return peer


def limit_memory(pid: int) -> None:
    """Limits the address space of a process that has just started, and of its children. Only Linux can."""
    if sys.platform == "linux":
        resource.prlimit(pid, resource.RLIMIT_AS, (NODE_LIMIT_BYTES, NODE_LIMIT_BYTES))


@dataclass(frozen=True, slots=True)
class Reading:
    """Figures of all processes of a rig: memory (of each process, and in sum), peak memory, open files, lines of
    log."""

    rss_of: dict[int, int]
    rss: int
    peak: int
    num_files: int
    num_lines: int
    pids: tuple[int, ...]

    @staticmethod
    def of(rig: Rig) -> Reading:
        processes = rig.processes()
        rss_of = {process.pid: process.memory_info().rss for process in processes}
        return Reading(
            rss_of,
            sum(rss_of.values()),
            sum(_peak(process.pid) for process in processes),
            sum(process.num_fds() for process in processes),
            sum(len(node.log.splitlines()) for node in rig.nodes),
            tuple(sorted(process.pid for process in processes)),
        )


def _peak(pid: int) -> int:
    """Returns VmHWM in bytes; 0 if /proc has none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


class Watch:
    """Reads the memory of the nodes and of their children all the time, in a thread of its own.

    node_share: the most that a node had, as a share of what it had at the start. child_bytes: the most that one of its
    children had.
    """

    def __init__(self, rig: Rig) -> None:
        self._nodes = [psutil.Process(node.pid) for node in rig.nodes]
        self._idle = [process.memory_info().rss for process in self._nodes]
        self._cpu_before_s = sum(map(_cpu_s, self._nodes))
        self.node_share = 1.0
        self.child_bytes = 0
        self.cpu_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(WATCH_S):
            for process, idle in zip(self._nodes, self._idle, strict=True):
                with suppress(psutil.Error):
                    self.node_share = max(self.node_share, process.memory_info().rss / idle)
                    for child in process.children(recursive=True):
                        self.child_bytes = max(self.child_bytes, child.memory_info().rss)
            self.cpu_s = max(self.cpu_s, sum(map(_cpu_s, self._nodes)) - self._cpu_before_s)


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


class Prober:
    """Requests /healthz of every node all the time, with a pause of pause_s, and keeps the times."""

    def __init__(self, rig: Rig, pause_s: float = 1.0) -> None:
        self._urls = [node.url for node in rig.nodes]
        self._pause_s = pause_s
        self.num_asked = self.num_failed = 0
        self.took_s: list[float] = []

    @property
    def worst_s(self) -> float:
        return max(self.took_s, default=0.0)

    @property
    def p99_s(self) -> float:
        return sorted(self.took_s)[int(0.99 * len(self.took_s))] if self.took_s else 0.0

    async def run(self) -> None:
        while True:
            for url in self._urls:
                took_s = await asyncio.to_thread(_healthz, url)
                self.num_asked += 1
                self.num_failed += took_s is None
                self.took_s.append(PROBE_S if took_s is None else took_s)
            await asyncio.sleep(self._pause_s)


async def beside_hog(rig: Rig) -> float:
    """Returns the 99th percentile of /healthz, in seconds, while one other process computes: what the times during an
    attack are compared with, because machines differ."""
    prober = Prober(rig, 0.02)
    with hogs(1), suppress(TimeoutError):
        async with asyncio.timeout(HOG_S):
            await prober.run()
    return prober.p99_s


def _healthz(url: str) -> float | None:
    began = time.monotonic()
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=PROBE_S) as response:
            response.read()
    except OSError:
        return None
    return time.monotonic() - began


def verdict(rig: Rig, before: Reading, after: Reading, prober: Prober, *, only_nodes: bool = False) -> list[str]:
    """Lists the deviations from what must hold. only_nodes: children may grow, up to bounds that others check."""
    found = list(rig.harm)
    pids = [node.pid for node in rig.nodes] if only_nodes else list(before.rss_of)
    both = [after.rss_of[pid] / before.rss_of[pid] for pid in pids if pid in after.rss_of]
    growth = max(both, default=1.0)
    if growth > MAX_GROWTH:
        found.append(f"a process has {growth:.2f} times the memory that it had")
    if prober.num_failed:
        found.append(f"{prober.num_failed} of {prober.num_asked} /healthz without an answer")
    found += [f"node {index} has ended" for index, node in enumerate(rig.nodes) if not node.alive]
    if not all(node.alive for node in rig.nodes):
        return found
    logs = "\n".join(node.log for node in rig.nodes)
    if "Traceback" in logs:
        found.append(f"{logs.count('Traceback')} tracebacks in the log, the first in: {_around(logs, 'Traceback')}")
    for index in range(len(rig.nodes)):
        reasons = rig.api_of(index).get("/health").get("reasons", [])
        found += [f"/health: {reason['message']}" for reason in reasons if reason.get("code") == "task_ended"]
    if (answer := rig.ask()) != rig.answer:
        found.append(f"a chat is answered {answer!r} and not {rig.answer!r} as before")
    return found


def _around(text: str, word: str) -> str:
    at = text.index(word)
    return repr(text[max(0, at - 300) : at + 2500])


def _port(address: str) -> int:
    return int(address.rstrip("/").rpartition(":")[2])

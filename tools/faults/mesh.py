"""Real `exo-mesh serve` processes on separate loopback addresses, connected through a fault proxy."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from exo_mesh.cli.client.child_node import ChildNode, ReadyNode, start_node, stop_all
from exo_mesh.errors import MeshError, PlacementError
from tools.faults.faulty import install
from tools.faults.proxy import FaultProxy, Way, pairs
from tools.faults.quota import CpuQuota

MODEL = "exo-mesh-demo"
NUM_LAYERS = 8
START_S = 90.0
JOIN_S = 60.0
PLACE_S = 120.0
PLACE_TRIES = 3
MARK = "EXO_FAULTS_MARK"
"""Set in the environment of every process that a mesh starts, so that it is found whatever its parent is by then."""

DETERMINISTIC = ("--engine", "numpy", "--engine-option", "mode=deterministic")
"""Settings for bit-identical text for any split, batch and replay."""

SIGNS = (": WARNING ", ": ERROR ")


def faulty(**options: object) -> tuple[str, ...]:
    """Returns the flags of a node whose engine fails in the ways of `tools.faults.faulty`."""
    given = {"mode": "deterministic", **options}
    named = [word for name, value in given.items() for word in ("--engine-option", f"{name}={value}")]
    return ("--engine", "faulty", *named)


_numbers = itertools.count()

quota = CpuQuota(0)
"""Of the nodes that are started from now on."""


def why_not() -> str:
    """Says why this machine cannot run such a mesh; "" if it can."""
    try:
        with socket.create_server(("127.77.0.2", 0)):
            return ""
    except OSError:
        return "this system has one loopback address"


def wait_until(condition: Callable[[], object], deadline_s: float, what: str) -> float:
    """Returns the seconds until the condition holds. Raises AssertionError with `what` if it does not before the
    deadline."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > deadline_s:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        time.sleep(0.02)
    return time.monotonic() - begin


@dataclass
class Node(ReadyNode):
    """One node at its own address, over its restarts."""

    number: int
    home: Path
    address: str
    grpc_port: int
    flags: Sequence[str]
    environ: Mapping[str, str]
    child: ChildNode | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False
    """Whether it is stopped by SIGSTOP."""

    def start(self) -> None:
        """Starts the process; `await_ready` waits."""
        assert not self.alive
        if self.child is not None:
            self.child.stop()  # the old process is dead; our end of its pipe is still open
            self._before += self.child.log
        place = ["--host", self.address, "--grpc-port", str(self.grpc_port)]
        self.child = start_node(self.home, [*place, *self.flags], self.environ, without=["--measure-engines"])
        quota.hold(self.child.pid, f"n{self.number}")
        self.stopped = False

    def await_ready(self) -> None:
        assert self.child is not None
        self.ready = self.child.wait_ready(START_S)

    @property
    def log(self) -> str:
        """Everything that it has written, over its restarts."""
        return self._before + ("" if self.child is None else self.child.log)

    _before: str = ""
    _frozen: list[int] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether the process exists. A stopped process counts."""
        return self.child is not None and self.child.alive

    @property
    def serves(self) -> bool:
        return self.alive and not self.stopped

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    @property
    def control(self) -> str:
        return f"{self.address}:{self.grpc_port}"

    def runners(self) -> list[int]:
        """Returns the pids of the runner processes that this node has started and that still run."""
        return [] if self.child is None else [process.pid for process in self.child.runners()]

    def metric(self, name: str) -> float:
        """Returns the sum over all labels; 0 if the metric does not exist yet."""
        lines = self.api.text("/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def signs(self, since: float) -> list[tuple[float, str]]:
        """Returns (Unix time, message) of every log line since a Unix time that reports a problem: at WARN or above,
        the WARN lines of its runners, and suspected peers."""
        found = []
        for line in self.log.splitlines():
            if not line.startswith('{"time"') or not line.endswith("}"):
                continue
            entry = json.loads(line)
            message = str(entry["message"])
            wrong = entry["level"] in ("warning", "error") or any(word in message for word in SIGNS)
            written_at = datetime.fromisoformat(entry["time"]).timestamp()
            if wrong and written_at >= since:
                found.append((written_at, message))
        return found

    def send(self, sign: signal.Signals) -> None:
        """Sends a signal to the node's process alone; its runners have their own sessions."""
        os.kill(self.pid, sign)
        self.stopped = sign is signal.SIGSTOP or (self.stopped and sign is not signal.SIGCONT)
        if sign is signal.SIGKILL and self.child is not None:
            wait_until(lambda: not self.alive, 10, "a killed process ends")

    def freeze(self) -> None:
        """Stops the node and its runners together, as when a laptop's lid is closed."""
        self.send(signal.SIGSTOP)
        self._frozen = self.runners()
        for pid in self._frozen:
            _signal(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Continues all of them, runners first, so that the node does not take a stopped runner for dead."""
        for pid in self._frozen:
            _signal(pid, signal.SIGCONT)
        self._frozen = []
        self.send(signal.SIGCONT)


class FaultMesh:
    """Several nodes; nodes[i] reaches the others through the proxy as caller i."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes: list[Node] = []
        self.mark = uuid.uuid4().hex
        self._net = f"127.{64 + os.getpid() // 250 % 128}.{os.getpid() % 250}"
        self._first = 2 + 8 * (next(_numbers) % 30)
        self.proxy = FaultProxy(
            self._number_of,
            lambda number: self.nodes[number].address,
            lambda target: target in {node.control for node in self.nodes},
        )
        self.warm_load_s = math.inf
        """The shortest time of placing the demo model so far: its files are in the page cache."""

    def _number_of(self, host: str) -> int | None:
        return next((node.number for node in self.nodes if node.address == host), None)

    def add(self, *flags: str, engine: Sequence[str] = DETERMINISTIC) -> Node:
        """Adds a node without starting it. It knows the addresses of all nodes of up to eight."""
        number = len(self.nodes)
        assert number < 8
        address = f"{self._net}.{self._first + number}"
        with socket.create_server((address, 0)) as probe:
            port = probe.getsockname()[1]
        home = self.root / f"n{number}"
        known = [node.control for node in self.nodes]
        bootstrap = ["--bootstrap-peers", ",".join(known)] if known else []
        always = ["--namespace", f"faults-{self.mark[:8]}", "--log-level", "info"]
        node = Node(number, home, address, port, [*always, *engine, *bootstrap, *flags], self._environ(home, number))
        self.nodes.append(node)
        return node

    def _environ(self, home: Path, number: int) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("EXO_", "OVERRIDE_"))}
        one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        paths = {"PYTHONPATH": install(self.root / "site")}
        own = {"grpc_proxy": self.proxy.listen_for(number), MARK: self.mark, "HF_HUB_CACHE": str(home / "hub")}
        return {**kept, **one_thread, **paths, **own}

    @property
    def serving(self) -> list[Node]:
        return [node for node in self.nodes if node.serves]

    def start(self) -> None:
        """Starts all nodes that do not run, and waits until all nodes know each other."""
        begun = [node for node in self.nodes if not node.alive]
        for node in begun:
            node.start()
        for node in begun:
            node.await_ready()
        self.await_joined()

    def await_joined(self, deadline_s: float = JOIN_S) -> float:
        """Waits until each serving node knows every other one with its models and memory; returns the seconds."""
        ids = {node.id for node in self.serving}
        return wait_until(lambda: all(knows_all(node, ids) for node in self.serving), deadline_s, "all know each other")

    def place(self, over: Sequence[Node], at: Node | None = None) -> dict[str, Any]:
        """Deletes existing instances, places the demo model over these nodes, the first layers on the first, and
        returns the instance when all nodes see it. at: the node that places it, and then owns it."""
        self.delete_all()
        at = at or over[0]
        each = NUM_LAYERS // len(over)
        stops = [each * (index + 1) for index in range(len(over) - 1)] + [NUM_LAYERS]
        pins = {node.id: [start, stop] for node, start, stop in zip(over, [0, *stops], stops, strict=False)}
        instance = self._placed(at, {"model": MODEL, "pins": pins})
        wait_until(lambda: all(node.instances() == [instance] for node in self.serving), 30, "all see the instance")
        return instance

    def _placed(self, at: Node, wish: dict[str, Any]) -> dict[str, Any]:
        """Calls POST /instance. On a machine so busy that peers seem gone it retries, because the test itself comes
        later."""
        for attempt in itertools.count(1):
            begin = time.monotonic()
            try:
                instance: dict[str, Any] = at.api.post("/instance", wish, PLACE_S)
            except PlacementError:
                if attempt == PLACE_TRIES:
                    raise
                self.await_joined()
                continue
            self.warm_load_s = min(self.warm_load_s, time.monotonic() - begin)
            return instance
        raise AssertionError("unreachable")

    def delete_all(self) -> None:
        """Deletes every instance, even one that is being recovered and reappears after the deletion."""

        def none_is_left() -> bool:
            for node in self.serving:
                for instance in node.instances():
                    with contextlib.suppress(MeshError):  # it ended in the meantime
                        node.api.delete(f"/instance/{instance['id']}", 30)
                    return False
            return True

        wait_until(none_is_left, 60, "no instance is left")

    def node_of(self, peer_id: str) -> Node:
        return next(node for node in self.nodes if node.id == peer_id)

    def ways(self, *nodes: Node) -> list[Way]:
        """Lists the links between these nodes, or between all."""
        return list(pairs([node.number for node in nodes or self.nodes]))

    def orphans(self) -> list[int]:
        """Returns the pids of processes of this mesh that belong to no live node."""
        owned = {pid for node in self.nodes if node.alive for pid in (node.pid, *_descendants(node.pid))}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = process.pid not in owned and process.environ().get(MARK) == self.mark
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def close(self) -> None:
        """Ends all processes. Raises AssertionError if a process is left, after killing it."""
        self.proxy.release()
        for node in self.nodes:
            if node.stopped:
                node.thaw()
        stop_all(node.child for node in self.nodes if node.child is not None)
        self.proxy.close()
        try:
            wait_until(lambda: not self.orphans(), 5, "no process is left")
        finally:
            for pid in self.orphans():
                os.kill(pid, signal.SIGKILL)


def _signal(pid: int, sign: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sign)


def _descendants(pid: int) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def knows_all(node: Node, ids: set[str]) -> bool:
    """Whether the node answers, and knows exactly these peers with their models and memory."""
    try:
        return node.knows(ids, MODEL)
    except MeshError:
        return False


def fault_mesh(
    root: Path, count: int, *flags: str, engine: Sequence[str] = DETERMINISTIC
) -> contextlib.AbstractContextManager[FaultMesh]:
    """Like `mesh_of`, with one engine for all nodes."""
    return mesh_of(root, [engine] * count, *flags)


@contextlib.contextmanager
def mesh_of(root: Path, engines: Sequence[Sequence[str]], *flags: str) -> Iterator[FaultMesh]:
    """Yields nodes that all know each other; checks afterwards that no process is left, and none has written a
    traceback.

    engines: the flags of each node's engine; flags: for all nodes.
    """
    mesh = FaultMesh(root)
    try:
        for engine in engines:
            mesh.add(*flags, engine=engine)
        mesh.start()
        yield mesh
    finally:
        mesh.close()
    for node in mesh.nodes:
        before, found, behind = node.log.partition("Traceback (most recent call last)")
        assert not found, f"n{node.number}: {before[-400:]}{found}{behind[:4000]}"


MAX_USES = 2
"""Most uses of one mesh: a peer whose runner dies three times within a minute is avoided for a while, which is tested
elsewhere."""


class Meshes:
    """Meshes of several sizes, one at a time, reused up to MAX_USES unless a run failed."""

    def __init__(self, root: Path, engine: Sequence[str] = DETERMINISTIC) -> None:
        """engine: the flags of each node's engine."""
        self._root, self._engine = root, engine
        self._held = contextlib.ExitStack()
        self._mesh: FaultMesh | None = None
        self._uses = 0

    def of(self, count: int) -> FaultMesh:
        """Returns the mesh with this many nodes; ends a mesh of another size first."""
        if self._mesh is None or len(self._mesh.nodes) != count or self._uses >= MAX_USES:
            self.close()
            folder = self._root / f"mesh-{next(_numbers)}"
            self._mesh = self._held.enter_context(fault_mesh(folder, count, engine=self._engine))
            self._uses = 0
        self._uses += 1
        return self._mesh

    def give_up(self) -> None:
        """Ends the mesh after a failed run, whatever its state."""
        with contextlib.suppress(AssertionError):
            self.close()

    def close(self) -> None:
        self._mesh = None
        self._held.close()

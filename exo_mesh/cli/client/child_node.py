"""Runs nodes as child processes: `exo-mesh serve`, which stops when its standard input closes.

So a child stops even if this process is killed. The child's output goes to a file; its "ready" event is read there.
Everything that starts nodes does it here: verbs, benchmarks, fault and fuzz tools, tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.errors import DeadlineError, MeshError
from exo_mesh.settings.aliases import ALIASES

READY_DEADLINE_S = 60.0
POLL_S = 0.05
STOP_DEADLINE_S = 5.0
"""A node guarantees to stop within this time."""

_QUIET = {
    "--host": "127.0.0.1",
    "--grpc-port": "0",
    "--api-port": "0",
    "--discovery": "none",
    "--measure-engines": "off",
}


class ChildNodeError(MeshError):
    """A child node exited unexpectedly; the message has its last log lines."""

    code = "child_node_failed"


def client_of(ready: Mapping[str, Any]) -> ApiClient:
    """A client with local rights for the node that sent this "ready" event. "home": null means the default home."""
    return ApiClient(ready["api_url"], ready["home"], Path(ready["tls_cert"]) if ready["tls_cert"] else None)


class ReadyNode:
    """What can be asked of a node in another process, over its HTTP API."""

    def __init__(self, ready: dict[str, Any]) -> None:
        """ready: its "ready" event: node_id, name, home, api_url, grpc_address."""
        self.ready = ready

    @property
    def id(self) -> str:
        return str(self.ready["node_id"])

    @property
    def url(self) -> str:
        return str(self.ready["api_url"])

    @property
    def grpc_address(self) -> str:
        return str(self.ready["grpc_address"])

    @property
    def api(self) -> ApiClient:
        """A client with local rights."""
        return client_of(self.ready)

    def state(self) -> dict[str, Any]:
        """GET /state"""
        state: dict[str, Any] = self.api.get("/state")
        return state

    def instances(self) -> list[dict[str, Any]]:
        return list(self.state()["view"]["instances"])

    def knows(self, ids: set[str], model: str) -> bool:
        """Whether it knows exactly these peers, with their memory, and that each has the model."""
        state = self.state()
        peers = state["view"]["peers"]
        has_all = all(model in peer["models"] for peer in peers)
        return has_all and {peer["id"] for peer in peers} == ids == set(state["telemetry"])


class ChildNode(ReadyNode):
    """One child process. Creating the object starts it; the owner calls `wait_ready` and must call `stop`."""

    def __init__(
        self,
        flags: Sequence[str],
        log_path: Path,
        environ: Mapping[str, str],
        *,
        python: str | Path = "",
        directory: Path | None = None,
    ) -> None:
        """python: the interpreter; "": that of this process. directory: the working directory, where `python -m` looks
        first; None: that of this process."""
        super().__init__({})
        self.log_path = log_path
        command = [str(python or sys.executable), "-m", "exo_mesh.cli.main", "serve", *flags]
        command += ["--log-format", "json", "--until-stdin-closes"]
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                cwd=directory,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the parent, which then stops its children
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S, poll_s: float = POLL_S) -> dict[str, Any]:
        """Wait for the child's "ready" event and return it: node_id, name, home, api_url, grpc_address. Raises
        ChildNodeError or DeadlineError."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if ready := self._event("ready"):
                self.ready = ready
                return ready
            if not self.alive:
                raise ChildNodeError(f"a node exited with code {self._process.returncode}:\n{self.log_tail()}")
            time.sleep(poll_s)
        raise DeadlineError(f"a node was not ready after {deadline_s:g} s:\n{self.log_tail()}")

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def runners(self) -> list[psutil.Process]:
        """The runner processes that this node has started and that still run."""
        try:
            found = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [process for process in found if _is_runner(process)]

    def log_tail(self, num_lines: int = 12) -> str:
        """The path of the child's log and the log's last lines."""
        lines = self.log.splitlines()[-num_lines:]
        return "\n".join([f"last lines of {self.log_path}:", *(f"  {line}" for line in lines)])

    def ask_to_stop(self) -> None:
        """Start a clean stop and return at once. Further calls do nothing, because a second signal would make the node
        skip its cleanup."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        self._process.stdin.close()
        if self.alive:
            self._process.terminate()

    def stop(self) -> None:
        """Stop the child; kill its session if it is still alive 1 s after STOP_DEADLINE_S."""
        self.ask_to_stop()
        try:
            self._process.wait(STOP_DEADLINE_S + 1.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _event(self, name: str) -> dict[str, Any] | None:
        for line in self.log.splitlines():
            if line.startswith('{"event"') and line.endswith("}"):
                event: dict[str, Any] = json.loads(line)
                if event["event"] == name:
                    return event
        return None


def own_environ(**variables: str) -> dict[str, str]:
    """Returns this process's environment without settings of exo-mesh, and with these variables."""
    others = {alias.variable for alias in ALIASES}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("EXO_MESH_") and key not in others}
    return {**kept, **variables}


def start_node(
    home: Path,
    flags: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    without: Sequence[str] = (),
    **process: Any,
) -> ChildNode:
    """Starts a node with this home and this name, on the loopback, with free ports, which meets only whom its flags
    name. Flags replace any of that. without: usual flags that are left out. process: further arguments of ChildNode."""
    home.mkdir(parents=True, exist_ok=True)
    usual = {"--home": str(home), "--name": home.name, **_QUIET}
    own = [word for flag, value in usual.items() if flag not in (*flags, *without) for word in (flag, value)]
    return ChildNode([*own, *flags], home / "node.log", own_environ() if environ is None else environ, **process)


@contextlib.contextmanager
def running_node(
    home: Path,
    flags: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    poll_s: float = POLL_S,
    **process: Any,
) -> Iterator[ChildNode]:
    """Starts a node as `start_node` does, waits until it is ready, and stops it at the end of the block."""
    child = start_node(home, flags, environ, **process)
    try:
        child.wait_ready(poll_s=poll_s)
        yield child
    finally:
        child.stop()


def stop_all(children: Iterable[ChildNode]) -> None:
    """Stops children side by side."""
    stopping = list(children)
    for child in stopping:
        child.ask_to_stop()
    for child in stopping:
        child.stop()


def _is_runner(process: psutil.Process) -> bool:
    try:
        return "exo_mesh.rings.runner" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    """A port on 127.0.0.1 that is free at the moment of the call."""
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

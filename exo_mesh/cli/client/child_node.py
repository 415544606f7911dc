"""Runs a node as a child process: `exo-mesh serve`, which stops when its standard input closes.

So the child stops even if this process is killed. The child's output goes to a file; its "ready" event is read there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.errors import DeadlineError, MeshError

_POLL_S = 0.05
STOP_DEADLINE_S = 5.0
"""A node guarantees to stop within this time."""


class ChildNodeError(MeshError):
    """A child node exited unexpectedly; the message has its last log lines."""

    code = "child_node_failed"


def client_of(ready: Mapping[str, Any]) -> ApiClient:
    """A client with local rights for the node that sent this "ready" event. "home": null means the default home."""
    return ApiClient(ready["api_url"], ready["home"], Path(ready["tls_cert"]) if ready["tls_cert"] else None)


class ChildNode:
    """One child process. Creating the object starts it; the owner calls `wait_ready` and must call `stop`."""

    def __init__(self, flags: Sequence[str], log_path: Path, environ: Mapping[str, str]) -> None:
        self.log_path = log_path
        command = [sys.executable, "-m", "exo_mesh.cli.main", "serve", *flags]
        command += ["--log-format", "json", "--until-stdin-closes"]
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,  # Ctrl-C in the terminal reaches only the parent, which then stops its children
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, deadline_s: float) -> dict[str, Any]:
        """Wait for the child's "ready" event and return it: node_id, name, home, api_url, grpc_address. Raises
        ChildNodeError or DeadlineError."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if ready := self._event("ready"):
                return ready
            if not self.alive:
                raise ChildNodeError(f"a node exited with code {self._process.returncode}:\n{self.log_tail()}")
            time.sleep(_POLL_S)
        raise DeadlineError(f"a node was not ready after {deadline_s:g} s:\n{self.log_tail()}")

    def log_tail(self, num_lines: int = 12) -> str:
        """The path of the child's log and the log's last lines."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-num_lines:]
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
        for line in self.log_path.read_text(errors="replace").splitlines():
            if line.startswith('{"event"') and line.endswith("}"):
                event: dict[str, Any] = json.loads(line)
                if event["event"] == name:
                    return event
        return None

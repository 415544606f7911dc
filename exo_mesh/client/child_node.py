"""A node as a child process: `exo-mesh serve`, which stops when its standard input closes.

So it cannot outlive us, however we end. Its output goes to a file, from which the line that says "ready" is read.
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

from exo_mesh.client.api_client import ApiClient
from exo_mesh.errors import DeadlineError, MeshError

_POLL_S = 0.05
STOP_DEADLINE_S = 5.0
"""A node promises to stop within this."""


class ChildNodeError(MeshError):
    """A child node ended by itself; the message has its last log lines."""

    code = "child_node_failed"


def client_of(ready: Mapping[str, Any]) -> ApiClient:
    """A client, with local rights, of the node whose "ready" event this is. Without a home it is the usual one."""
    return ApiClient(ready["api_url"], ready["home"], Path(ready["tls_cert"]) if ready["tls_cert"] else None)


class ChildNode:
    """One child. Start it, wait until it is ready, and always stop it."""

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
                start_new_session=True,  # Ctrl-C in the terminal is for the parent, which then stops its children
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, deadline_s: float) -> dict[str, Any]:
        """Its "ready" event: node_id, name, home, api_url, grpc_address. Raises ChildNodeError or DeadlineError."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if ready := self._event("ready"):
                return ready
            if not self.alive:
                raise ChildNodeError(f"a node ended with exit code {self._process.returncode}:\n{self.log_tail()}")
            time.sleep(_POLL_S)
        raise DeadlineError(f"a node was not ready after {deadline_s:g} s:\n{self.log_tail()}")

    def log_tail(self, num_lines: int = 12) -> str:
        """Where its log is, and the last lines of it."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-num_lines:]
        return "\n".join([f"last lines of {self.log_path}:", *(f"  {line}" for line in lines)])

    def ask_to_stop(self) -> None:
        """Begin a clean stop; returns at once. Asking again changes nothing: a node ends unclean at a second signal."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        self._process.stdin.close()
        if self.alive:
            self._process.terminate()

    def stop(self) -> None:
        """Stop it; kill its session if it has not ended within STOP_DEADLINE_S."""
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

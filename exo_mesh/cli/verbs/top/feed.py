"""Follows the live data of a mesh in a thread, and switches to another member when the node dies."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

from exo_mesh.base.printable import ANSWER_CHARS, printable_values
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.mesh_nodes import MeshNodes
from exo_mesh.cli.verbs.top.live_data import LiveData, patched
from exo_mesh.errors import MeshError

SILENCE_S = 8.0
"""Timeout of the stream, in which a node sends an event every 2 s."""
RETRY_S = 1.0
POLL_S = 2.0
_SNAPSHOT_DEADLINE_S = 5.0
_RECENT = 50


class LiveDataFeed:
    """`data`: the current data, which only the thread writes. `wake`: a descriptor that is readable after a change."""

    def __init__(self, members: MeshNodes) -> None:
        self._members = members
        self.data = LiveData()
        self.wake, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        self._stopped = threading.Event()
        self._num_ended = -1
        self._thread = threading.Thread(target=self._run, name="live data", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the feed. The thread ends at its next event or timeout; the process need not wait for it."""
        self._stopped.set()

    def join(self) -> None:
        """Waits until the thread has ended, and closes the pipe."""
        self._thread.join()
        os.close(self.wake)
        os.close(self._bell)

    def _run(self) -> None:
        while not self._stopped.is_set():
            client = self._members.client
            try:
                self._follow(client)
            except MeshError as exc:
                if self._stopped.is_set():
                    return
                self._members.leave(client)
                turned = self._members.client is not client
                other = f"; asking {self._members.name_of(self._members.client)}" if turned else "; trying again"
                self.data.note = f"{self._members.name_of(client)}: {exc}{other}"
                self.data.source = "connecting"
                self._ring()
                self._stopped.wait(RETRY_S)

    def _follow(self, client: ApiClient) -> None:
        """Follows one node until it fails. Polls snapshots from a node that accepts no more streams."""
        document: dict[str, Any] = {}
        try:
            for event in client.stream("/metrics/stream", None, silence_s=SILENCE_S):
                if self._stopped.is_set():
                    return
                if event.get("type") in ("document", "patch"):
                    document = patched(document if event["type"] == "patch" else {}, event["data"])
                    self.take(client, document, "live")
        except MeshError as exc:
            if exc.code not in ("overloaded", "not_found", "internal_error"):
                raise
            self._poll(client)

    def _poll(self, client: ApiClient) -> None:
        while not self._stopped.wait(POLL_S):
            self.take(client, read_snapshot(client), "snapshots")

    def take(self, client: ApiClient, document: dict[str, Any], source: str) -> None:
        """Takes a document of a node as the current data. After `start`, only the thread may call this."""
        document = printable_values(document, ANSWER_CHARS)
        data = self.data
        if not data.document or data.url != client.url:
            self._num_ended = -1
        if data.source == "live" or source == data.source:
            data.note = ""
        data.take(document)
        data.url, data.source = client.url, source
        self._members.note(document["peers"].values(), document["health"])
        num_ended = document["requests"].get("total", 0)
        if num_ended != self._num_ended:
            self._num_ended = num_ended
            with contextlib.suppress(MeshError):
                data.requests = read_requests(client)
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._bell, b"!")


def read_snapshot(client: ApiClient) -> dict[str, Any]:
    """Fetches the live document once."""
    document: dict[str, Any] = client.get("/metrics/snapshot", _SNAPSHOT_DEADLINE_S)
    return document


def read_requests(client: ApiClient) -> list[dict[str, Any]]:
    """Fetches the last requests that entered at the node, the newest first."""
    found: list[dict[str, Any]] = client.get(f"/requests/recent?n={_RECENT}", _SNAPSHOT_DEADLINE_S)["requests"]
    return found

"""Shows progress until a model answers or is loaded: downloads, then loading."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any, Self

from exo_mesh.cli.client.mesh_nodes import MeshNodes
from exo_mesh.cli.tables import peer_names, ring_line
from exo_mesh.cli.verbs.models.bars import Bars
from exo_mesh.cli.verbs.models.facts import UNFINISHED
from exo_mesh.errors import MeshError

_POLL_S = 0.5
_DEADLINE_S = 2.0
_QUIET = ("keep-alive", "fetching")
"""Comments that add nothing to the progress bars."""


class WaitingScreen:
    """Shows on standard error what a request or a placement waits for, until `end`.

    Its thread polls the node, because the stream of the request is silent while the model is looked up on the hub.
    """

    def __init__(self, members: MeshNodes, model: str, *, asks: bool = True) -> None:
        """asks: a question waits for its answer; without one, an instance that is placed."""
        self._members = members
        self._model = model
        self._asks = asks
        self._bars = Bars(sys.stderr, keeps=False)
        self._phase = "waiting for the model"
        self._is_unknown = True
        self._fetching: dict[tuple[str, str], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="waiting screen", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._thread.join()
        if kind is KeyboardInterrupt and self._is_fetching():
            text = f"the downloaded part of {self._model} is kept; the same command resumes"
            print(f"\nexo-mesh: {text}", file=sys.stderr)

    def comment(self, text: str) -> None:
        """Takes a comment from the request's stream as the current phase."""
        says_less = text == "loading" and self._phase.startswith("loading:")
        if text.partition(" ")[0] not in _QUIET and not says_less:
            self._is_unknown, self._phase = False, text

    def end(self) -> None:
        """Clears the screen at the first token. May be called more than once."""
        with self._lock:
            self._ended.set()
            self._bars.close()

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            try:
                downloads = self._members.client.get("/v1/download/progress", _DEADLINE_S)["data"]
                if self._is_unknown and sys.stderr.isatty():
                    self._guess_phase()
            except MeshError:
                continue  # the request itself reports what is wrong
            with self._lock:
                if not self._ended.is_set():
                    self._show(downloads)

    def _guess_phase(self) -> None:
        """Derives the phase from `GET /state` until the stream has sent its first comment."""
        state = self._members.client.get("/state", _DEADLINE_S)
        names = peer_names(state)
        found = [one for one in state["view"]["instances"] if one["model"] == self._model]
        loading = [one for one in found if one.get("state") != "ready"]
        if self._asks and len(loading) < len(found):
            phase = "waiting for the first token"
        elif loading:
            phase = f"loading: {ring_line(loading[0], names)}"
        else:
            phase = "looking for a place for the model"
        if self._is_unknown:
            self._phase = phase

    def _show(self, downloads: list[dict[str, Any]]) -> None:
        """Shows the downloads that ran since the question, and the phase if none runs now."""
        for entry in downloads:
            key = entry["peer_id"], entry["model"]
            if entry["state"] in UNFINISHED or key in self._fetching:
                self._fetching[key] = entry
        self._bars.show(self._fetching.values(), "" if self._is_fetching() else self._phase)

    def _is_fetching(self) -> bool:
        return any(entry["state"] in UNFINISHED for entry in self._fetching.values())

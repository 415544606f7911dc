"""Metrics of RKLLM boards: whether their RKLLAMA is up, and how long answers and loading take."""

from __future__ import annotations

from collections.abc import Mapping

from exo_mesh.base.telemetry.families import Gauges, Histograms
from exo_mesh.base.telemetry.request_metrics import LATENCY_BOUNDS_S

MAX_AT_ONCE = 64
"""Most answers that are counted for one heartbeat, which comes twice a second."""

ENGINE = "rkllm"
"""The engine whose figures are shown here; figures of other engines are ignored."""

LOAD_BOUNDS_S = (0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 180)
"""Buckets for loading a model: from a model that was loaded already to the engine's deadline."""


class RkllmMetrics:
    """The metrics of the boards of a node. Every function has the engine as its first argument and may be called for
    any, so that the callers need no case for this one."""

    def __init__(self) -> None:
        # fmt: off
        self.server_up = Gauges(
            "exo_mesh_rkllm_server_up", "1 if a RKLLAMA server of this node answers.", ("server",)
        )
        self.inference_duration = Histograms(
            "exo_mesh_rkllm_inference_duration_seconds", "Time of an answer of RKLLAMA, from the request to its end.",
            LATENCY_BOUNDS_S,
        )
        self.model_load_duration = Histograms(
            "exo_mesh_rkllm_model_load_duration_seconds", "Time until RKLLAMA has a model ready.", LOAD_BOUNDS_S
        )
        # fmt: on

    def note_servers(self, engine: str, is_up: Mapping[str, bool]) -> None:
        """Replaces the state of an engine's servers, by address, as the last look at them found it. A server that is
        not in the mapping has no series any more."""
        if engine != ENGINE:
            return
        self.server_up.clear()
        for server, up in is_up.items():
            self.server_up.labels(server).set(float(up))

    def note_answers(self, engine: str, ended: int, busy_s: float) -> None:
        """Counts the answers that have ended between two heartbeats, with their mean time: a board computes one at a
        time, so there is rarely more than one. busy_s: seconds that the board computed in between."""
        if engine == ENGINE and ended > 0:
            for _ in range(min(ended, MAX_AT_ONCE)):
                self.inference_duration.observe(busy_s / ended)

    def note_load(self, engine: str, duration_s: float) -> None:
        """Counts a model that an engine has made ready."""
        if engine == ENGINE:
            self.model_load_duration.observe(duration_s)

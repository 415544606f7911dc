"""Metrics of requests, counted on the node at which they entered."""

from __future__ import annotations

from collections import deque

from exo_mesh.base.telemetry.families import Counters, Gauges, Histograms

LATENCY_BOUNDS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
FIRST_TOKEN_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
INTER_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

STATUSES = ("stop", "length", "cancelled", "error")

RATE_WINDOW_S = 10.0

_MODEL = ("model",)


class RequestMetrics:
    """The request metrics of a node. `enter` starts the count of one request."""

    def __init__(self) -> None:
        # fmt: off
        self.ended = Counters(
            "exo_mesh_requests_total", "Requests that entered here and have ended.", ("model", "status")
        )
        self.in_progress = Gauges(
            "exo_mesh_requests_in_progress", "Requests that entered here and have not ended.", _MODEL
        )
        self.errors = Counters(
            "exo_mesh_errors_total", "Requests that entered here and ended in an error, by its code.",
            ("model", "type"),
        )
        self.latency = Histograms(
            "exo_mesh_request_latency_seconds", "Time from a request's entry to its end.", LATENCY_BOUNDS_S, _MODEL
        )
        self.first_token = Histograms(
            "exo_mesh_first_token_latency_seconds", "Time from a request's entry to its first token.",
            FIRST_TOKEN_BOUNDS_S, _MODEL,
        )
        self.inter_token = Histograms(
            "exo_mesh_inter_token_latency_seconds", "Time between two tokens of a request.",
            INTER_TOKEN_BOUNDS_S, _MODEL,
        )
        self.prompt_tokens = Counters(
            "exo_mesh_prompt_tokens_total", "Prompt tokens of requests that entered here and have ended.", _MODEL
        )
        self.generated = Counters(
            "exo_mesh_tokens_generated_total", "Output tokens of requests that entered here.", _MODEL
        )
        self.per_second = Gauges(
            "exo_mesh_tokens_per_second", "Output tokens of requests that entered here, over the last 10 s.", _MODEL
        )
        self.resumed = Counters(
            "exo_mesh_requests_resumed_total", "Times a request continued after its ring was lost.", _MODEL
        )
        self.redials = Counters(
            "exo_mesh_driver_redials_total", "Times a broken stream from a driver was opened again.", _MODEL
        )
        # fmt: on
        self._totals: dict[str, deque[tuple[float, float]]] = {}
        self._new: set[str] = set()

    def enter(self, model: str) -> RequestMeter:
        """Counts a request that enters here; returns its meter. The caller must call the meter's `ended`."""
        self._new.add(model)
        return RequestMeter(self, model)

    def take_new(self) -> set[str]:
        """Models that requests used since the last call."""
        new, self._new = self._new, set()
        return new

    def live_models(self) -> set[str]:
        """Models with requests that have not ended."""
        return {model for (model,), cell in self.in_progress.series() if cell.value}

    def tick(self, now: float) -> None:
        """Updates `per_second`; called about once a second."""
        totals: dict[str, deque[tuple[float, float]]] = {}
        for (model,), cell in self.generated.series():
            readings = totals[model] = self._totals.get(model, deque())
            readings.append((now, cell.value))
            while len(readings) > 2 and readings[1][0] <= now - RATE_WINDOW_S:
                readings.popleft()
            then, before = readings[0]
            self.per_second.labels(model).set((cell.value - before) / (now - then) if now > then else 0.0)
        self._totals = totals


class RequestMeter:
    """Counts one request. Looks up the series once, not for each token."""

    __slots__ = ("_generated", "_inter_token", "_metrics", "_model")

    def __init__(self, metrics: RequestMetrics, model: str) -> None:
        self._metrics, self._model = metrics, model
        self._generated = metrics.generated.labels(model)
        self._inter_token = metrics.inter_token.labels(model)
        metrics.in_progress.labels(model).inc()
        for family in (metrics.resumed, metrics.redials, metrics.prompt_tokens):
            family.labels(model)  # start at 0: rate() does not count an event that creates its series
        for status in STATUSES:
            metrics.ended.labels(model, status)

    def first_token(self, ttft_s: float) -> None:
        self._generated.value += 1
        self._metrics.first_token.labels(self._model).add(ttft_s)

    def next_token(self, gap_s: float) -> None:
        self._generated.value += 1
        self._inter_token.add(gap_s)

    def resumed(self) -> None:
        """Counts that the request continues after its ring was lost."""
        self._metrics.resumed.labels(self._model).inc()

    def redialled(self) -> None:
        """Counts that the broken stream from the driver was opened again."""
        self._metrics.redials.labels(self._model).inc()

    def ended(self, outcome: str, num_prompt: int, latency_s: float, *, is_error: bool) -> None:
        """Counts the end of the request. outcome: the finish reason, or the code of its error."""
        metrics, model = self._metrics, self._model
        metrics.in_progress.labels(model).dec()
        metrics.ended.labels(model, "error" if is_error else outcome).inc()
        metrics.prompt_tokens.labels(model).inc(num_prompt)
        metrics.latency.labels(model).add(latency_s)
        if is_error:
            metrics.errors.labels(model, outcome).inc()

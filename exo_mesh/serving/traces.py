"""What a sampled request went through, hop by hop: kept here for its entry peer to show. Times and names only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from exo_mesh.domain.request import FrameTrace, GenerateRequest

MAX_TRACES = 64
MAX_TOKENS = 4096
"""Times of tokens that a trace keeps; the rest of a longer answer is like these."""


@dataclass(slots=True)
class Leg:
    """The part of a request that one ring did. began_s: since the request entered; frames: their sent_s count from
    there. peers: names of the stages in ring order."""

    instance_id: str
    peers: tuple[str, ...]
    began_s: float
    frames: Sequence[FrameTrace] = ()


@dataclass(slots=True)
class RequestTrace:
    """trace_id: 32 hex digits, as OpenTelemetry has them. entered: Unix seconds; everything else is seconds since.
    key_id: of the API key that the request came with."""

    trace_id: str
    request_id: str
    model: str
    entered: float
    entered_at: float
    prompt_tokens: int
    key_id: str = ""
    legs: list[Leg] = field(default_factory=list)
    tokens_s: list[float] = field(default_factory=list)
    outcome: str = "running"
    duration_s: float = 0.0

    def begin_leg(self, instance_id: str, peers: Sequence[str], now: float) -> Leg:
        leg = Leg(instance_id, tuple(peers), now - self.entered_at)
        self.legs.append(leg)
        return leg

    def token(self, now: float) -> None:
        if len(self.tokens_s) < MAX_TOKENS:
            self.tokens_s.append(now - self.entered_at)

    def end(self, outcome: str, now: float) -> None:
        self.outcome, self.duration_s = outcome, now - self.entered_at

    def describe(self) -> dict[str, Any]:
        """In a line of a list."""
        return {
            "trace_id": self.trace_id,
            "request_id": self.request_id,
            "model": self.model,
            "entered": round(self.entered, 3),
            "outcome": self.outcome,
            "duration_s": round(self.duration_s, 6),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": len(self.tokens_s),
            "legs": len(self.legs),
        }


class TraceStore:
    """The last MAX_TRACES, by API key and trace id: clients choose trace ids."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._kept: OrderedDict[tuple[str, str], RequestTrace] = OrderedDict()

    def open(self, request: GenerateRequest, model: str, prompt_tokens: int, entered_at: float) -> RequestTrace:
        """Begin one. Another with its ids is replaced; the oldest makes room."""
        trace = RequestTrace(
            request.trace_id, request.request_id, model, self._now(), entered_at, prompt_tokens, request.key_id
        )
        self._kept.pop((request.key_id, request.trace_id), None)
        self._kept[request.key_id, request.trace_id] = trace
        while len(self._kept) > MAX_TRACES:
            self._kept.popitem(last=False)
        return trace

    def find(self, wanted: str, key_id: str | None = None) -> RequestTrace | None:
        """By its trace id, or the id of its request; the newest of several. key_id: see `all`."""
        return next((trace for trace in self.all(key_id) if wanted in (trace.trace_id, trace.request_id)), None)

    def all(self, key_id: str | None = None) -> list[RequestTrace]:
        """Newest first. With a key_id, only those that came with this API key ("": without one)."""
        return [trace for trace in reversed(self._kept.values()) if key_id in (None, trace.key_id)]


def chrome_trace(trace: RequestTrace) -> dict[str, Any]:
    """In the Trace Event Format, which chrome://tracing and Perfetto show: a row for the request, one for each stage.

    Stages measure with clocks of their own, so only durations travel: what a lap took besides waiting and computing is
    shared out evenly between its hops.
    """
    events: list[dict[str, Any]] = [_named(0, "request"), _span(0, trace.model, 0.0, trace.duration_s, cat="request")]
    events += [{**_event(0, "token", at), "ph": "i", "s": "t"} for at in trace.tokens_s]
    for leg in trace.legs:
        events += [_named(1 + stage, f"{leg.instance_id} stage {stage} {name}") for stage, name in enumerate(leg.peers)]
        for frame in leg.frames:
            events += _waterfall(leg, frame)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {**trace.describe(), "hops_are": "what is left of a lap, shared out evenly"},
    }


def _waterfall(leg: Leg, frame: FrameTrace) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    name = f"{'prefill' if frame.is_prefill else 'decode'} {frame.step}"
    facts = {"step": frame.step, "rows": frame.rows, "tokens": frame.tokens}
    busy_s = sum(stage.waited_s + stage.compute_s for stage in frame.stages)
    hop_s = max(0.0, frame.lap_s - busy_s) / max(1, len(frame.stages))
    at = leg.began_s + frame.sent_s
    for index, stage in enumerate(frame.stages):
        at += hop_s
        if stage.waited_s > 0:
            events.append(_span(1 + index, "wait", at, stage.waited_s, cat="wait", **facts))
        at += stage.waited_s
        events.append(_span(1 + index, name, at, stage.compute_s, cat="compute", **facts))
        at += stage.compute_s
    return events


def _event(row: int, name: str, at_s: float) -> dict[str, Any]:
    return {"name": name, "pid": 1, "tid": row, "ts": round(at_s * 1e6, 1)}


def _span(row: int, name: str, at_s: float, seconds: float, cat: str, **args: object) -> dict[str, Any]:
    return {**_event(row, name, at_s), "ph": "X", "dur": round(seconds * 1e6, 1), "cat": cat, "args": args}


def _named(row: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}

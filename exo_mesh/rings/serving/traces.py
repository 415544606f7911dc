"""Keeps the timing of traced requests, hop by hop, at their entry peer, for any peer to show. Times and names only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import msgspec

from exo_mesh.base.tasks import ChangeSignal
from exo_mesh.domain.request import FrameTrace, GenerateRequest
from exo_mesh.rings.serving.history import status_of

MAX_TRACES = 64
RUNNING = "running"

FIRST_LAPS, LAST_LAPS = 64, 960
"""First and last laps that a trace keeps of one ring: about 100 bytes each, and 40 for each stage."""
MAX_TOKENS = 4096
"""Token times that a trace keeps; the rest of a longer answer is similar."""


class LapSums(msgspec.Struct):
    """Where the time of all laps of one ring went. Laps of one request can overlap (chunks of its prompt): the time in
    which several are on their way counts once, and each takes its parts of the time that it adds.

    prefill_s, decode_s: stages computed. waited_s: its frames waited at a stage behind others. hops_s: the rest of the
    laps. first_s, until_s: begin of the first lap and end of the last one, as FrameTrace.sent_s counts.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    waited_s: float = 0.0
    hops_s: float = 0.0
    first_s: float = 0.0
    until_s: float = 0.0
    prefill_laps: int = 0
    decode_laps: int = 0

    @property
    def covered_s(self) -> float:
        """Seconds in which at least one lap was on its way."""
        return self.prefill_s + self.decode_s + self.waited_s + self.hops_s

    def add(self, frame: FrameTrace) -> None:
        """Add the next lap; frames do not overtake each other."""
        if not self.prefill_laps + self.decode_laps:
            self.first_s = self.until_s = frame.sent_s
        end_s = frame.sent_s + frame.lap_s
        new_s = max(0.0, end_s - max(frame.sent_s, self.until_s))
        self.until_s = max(self.until_s, end_s)
        compute_s = sum(stage.compute_s for stage in frame.stages)
        waited_s = sum(stage.waited_s for stage in frame.stages)
        whole_s = max(frame.lap_s, compute_s + waited_s)
        share = new_s / whole_s if whole_s > 0 else 0.0
        if frame.is_prefill:
            self.prefill_laps += 1
            self.prefill_s += share * compute_s
        else:
            self.decode_laps += 1
            self.decode_s += share * compute_s
        self.waited_s += share * waited_s
        self.hops_s += share * (whole_s - compute_s - waited_s)


class Leg(msgspec.Struct):
    """The part of a request that one ring did. began_s: since the request entered; frames: their sent_s count from
    there. peers: names of the stages in ring order."""

    instance_id: str
    peers: tuple[str, ...]
    began_s: float
    frames: Sequence[FrameTrace] = ()
    sums: LapSums = msgspec.field(default_factory=LapSums)
    """Of all laps, also of laps that are not kept."""

    def add(self, frames: Sequence[FrameTrace]) -> None:
        """Add laps. Of many, the first and the last ones are kept."""
        for frame in frames:
            self.sums.add(frame)
        kept = [*self.frames, *frames]
        self.frames = [*kept[:FIRST_LAPS], *kept[FIRST_LAPS:][-LAST_LAPS:]]


class RequestTrace(msgspec.Struct):
    """The trace of one request. trace_id: 32 hex digits, as in OpenTelemetry. entered: Unix seconds; all other times
    are seconds since then. entered_at: of this node's clock; 0 in a copy from a peer or a file. key_id: of the API key
    that the request came with. names: other ids of the request that its client saw."""

    trace_id: str
    request_id: str
    model: str
    entered: float
    entered_at: float
    prompt_tokens: int
    key_id: str = ""
    legs: list[Leg] = msgspec.field(default_factory=list)
    tokens_s: list[float] = msgspec.field(default_factory=list)
    outcome: str = RUNNING
    duration_s: float = 0.0
    names: tuple[str, ...] = ()
    num_tokens: int = 0
    """Number of all output tokens; tokens_s has the times of the first MAX_TOKENS."""
    last_token_s: float = 0.0
    span_id: str = ""
    parent_span_id: str = ""
    trace_state: str = ""
    """As in GenerateRequest."""
    asked: dict[str, float] = msgspec.field(default_factory=dict)
    """Parameters of sampling and limits, by their names in the OpenTelemetry conventions."""

    @property
    def has_ended(self) -> bool:
        return self.outcome != RUNNING

    @property
    def output_tokens(self) -> int:
        return max(self.num_tokens, len(self.tokens_s))

    def is_called(self, wanted: str) -> bool:
        """Whether an id that a client saw is one of this request."""
        return wanted in (self.trace_id, self.request_id, *self.names)

    def begin_leg(self, instance_id: str, peers: Sequence[str], now: float) -> Leg:
        leg = Leg(instance_id, tuple(peers), now - self.entered_at)
        self.legs.append(leg)
        return leg

    def token(self, now: float) -> None:
        self.num_tokens += 1
        self.last_token_s = now - self.entered_at
        if len(self.tokens_s) < MAX_TOKENS:
            self.tokens_s.append(now - self.entered_at)

    def end(self, outcome: str, now: float) -> None:
        self.outcome, self.duration_s = outcome, now - self.entered_at

    def describe(self) -> dict[str, Any]:
        """The trace as one line of a list."""
        return {
            "trace_id": self.trace_id,
            "request_id": self.request_id,
            "model": self.model,
            "entered": round(self.entered, 3),
            "outcome": self.outcome,
            "status": status_of(self.outcome) if self.has_ended else RUNNING,
            "duration_s": round(self.duration_s, 6),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "legs": len(self.legs),
        }


class TraceStore:
    """The last MAX_TRACES traces, by API key, trace id and request id: clients choose trace ids, and requests of one
    agent share theirs. changed: beats when a trace ended or was deleted. on_end: called with each trace that has
    ended."""

    def __init__(
        self, now: Callable[[], float] = time.time, on_end: Callable[[RequestTrace], object] = lambda trace: None
    ) -> None:
        self._now = now
        self._on_end = on_end
        self._kept: OrderedDict[tuple[str, str, str], RequestTrace] = OrderedDict()
        self.changed = ChangeSignal()

    def open(self, request: GenerateRequest, model: str, prompt_tokens: int, entered_at: float) -> RequestTrace:
        """Begin a trace. Another trace with its ids is replaced; the oldest makes room."""
        trace = RequestTrace(
            request.trace_id,
            request.request_id,
            model,
            self._now(),
            entered_at,
            prompt_tokens,
            request.key_id,
            names=request.names,
            span_id=request.span_id,
            parent_span_id=request.parent_span_id,
            trace_state=request.trace_state,
            asked=_asked(request),
        )
        self.keep(trace)
        return trace

    def keep(self, trace: RequestTrace) -> None:
        """Add a trace as the newest."""
        key = (trace.key_id, trace.trace_id, trace.request_id)
        self._kept.pop(key, None)
        self._kept[key] = trace
        while len(self._kept) > MAX_TRACES:
            self._kept.popitem(last=False)

    def restore(self, traces: Iterable[RequestTrace]) -> None:
        """Add traces of an earlier start, oldest first, as older than all others."""
        newer = list(self._kept.values())
        for trace in (*traces, *newer):
            self.keep(trace)

    def end(self, trace: RequestTrace, outcome: str, now: float) -> None:
        """Note that the request of a trace has ended."""
        trace.end(outcome, now)
        self._on_end(trace)
        self.changed.beat()

    def find(self, wanted: str, key_id: str | None = None) -> RequestTrace | None:
        """A trace by its trace id, or any id of its request; the newest of several. key_id: see `all`."""
        return next((trace for trace in self.all(key_id) if trace.is_called(wanted)), None)

    def all(self, key_id: str | None = None) -> list[RequestTrace]:
        """All traces, newest first. With a key_id, only requests with this API key ("": without one)."""
        return [trace for trace in reversed(self._kept.values()) if key_id in (None, trace.key_id)]

    def delete(self, wanted: Container[str] | None) -> int:
        """Delete traces by their trace ids; None: all. Returns how many there were."""
        found = [key for key in self._kept if wanted is None or key[1] in wanted]
        for key in found:
            del self._kept[key]
        if found:
            self.changed.beat()
        return len(found)

    def forget_older(self, max_age_s: float) -> None:
        """Delete the traces of requests that entered longer ago than max_age_s."""
        oldest = self._now() - max_age_s
        for key in [key for key, trace in self._kept.items() if trace.entered < oldest]:
            del self._kept[key]


def _asked(request: GenerateRequest) -> dict[str, float]:
    sampling = request.sampling
    found: dict[str, float] = {"max_tokens": request.max_tokens, "temperature": sampling.temperature}
    wished = {
        "top_k": sampling.top_k,
        "top_p": 0.0 if sampling.top_p == 1.0 else sampling.top_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
    }
    return found | {name: value for name, value in wished.items() if value}

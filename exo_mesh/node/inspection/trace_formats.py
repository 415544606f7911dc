"""Converts traces: to the Trace Event Format, to sums per stage, and to and from JSON between peers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import msgspec

from exo_mesh.base.printable import printable
from exo_mesh.domain.bounded_json import MAX_VALUES, decode_bounded
from exo_mesh.domain.request import FrameTrace
from exo_mesh.errors import TransportError
from exo_mesh.rings.serving.traces import Leg, RequestTrace

MAX_JSON_BYTES = 12 * 2**20
"""Largest JSON of a trace. 1,024 laps over 16 stages need about 1 MB, and a request has a few such legs."""

MAX_LEGS, MAX_STAGES, MAX_FRAMES, MAX_TIMES = 64, 1024, 4096, 65_536
"""Limits of a trace from a peer or a file."""


def trace_to_json(trace: RequestTrace) -> bytes:
    """Encodes a trace for another peer or a file."""
    return msgspec.json.encode(trace)


def trace_from_json(data: bytes) -> RequestTrace:
    """Decodes a trace from a peer or a file. Raises TransportError if it is invalid or too large."""
    if len(data) > MAX_JSON_BYTES:
        raise TransportError(f"a trace has {len(data)} bytes, more than {MAX_JSON_BYTES}")
    try:
        trace = decode_bounded(data, RequestTrace, 5 * MAX_VALUES)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise TransportError(f"invalid trace: {exc}") from exc
    frames = [frame for leg in trace.legs for frame in leg.frames]
    stages = max((len(frame.stages) for frame in frames), default=0)
    peers = max((len(leg.peers) for leg in trace.legs), default=0)
    if len(trace.legs) > MAX_LEGS or len(frames) > MAX_FRAMES or max(stages, peers) > MAX_STAGES:
        raise TransportError(f"a trace has more than {MAX_LEGS} legs, {MAX_FRAMES} laps or {MAX_STAGES} stages")
    del trace.tokens_s[MAX_TIMES:]
    trace.entered_at = 0.0
    trace.trace_id, trace.request_id = printable(trace.trace_id, 64), printable(trace.request_id, 256)
    trace.model, trace.outcome = printable(trace.model), printable(trace.outcome, 64)
    trace.trace_state = printable(trace.trace_state, 512)
    trace.names = tuple(printable(name, 256) for name in trace.names[:8])
    for leg in trace.legs:
        leg.instance_id, leg.peers = printable(leg.instance_id), tuple(printable(peer, 256) for peer in leg.peers)
    return trace


def chrome_trace(trace: RequestTrace) -> dict[str, Any]:
    """Converts a trace to the Trace Event Format of chrome://tracing and Perfetto: a row for the request and each
    stage.

    Stages have separate clocks and report only durations, so the time of a lap without waiting and computing is divided
    evenly between its hops.
    """
    events: list[dict[str, Any]] = [_named(0, "request"), _span(0, trace.model, 0.0, trace.duration_s, cat="request")]
    events += [{**_event(0, "token", at), "ph": "i", "s": "t"} for at in trace.tokens_s]
    events += [_span(0, name, at, until - at, cat=name) for name, at, until in waits_of(trace)]
    for leg in trace.legs:
        events += [_named(1 + stage, f"{leg.instance_id} stage {stage} {name}") for stage, name in enumerate(leg.peers)]
        for frame in leg.frames:
            events += _waterfall(leg, frame)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {**trace.describe(), "hops_are": "the rest of a lap, divided evenly"},
    }


def _waterfall(leg: Leg, frame: FrameTrace) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    name = f"{'prefill' if frame.is_prefill else 'decode'} {frame.step}"
    facts = {"step": frame.step, "rows": frame.rows, "tokens": frame.tokens}
    for index, at, hop_s, waited_s, compute_s in stage_times(leg, frame):
        if hop_s > 0:
            events.append(_span(1 + index, "hop", at - hop_s, hop_s, cat="hop", **facts))
        if waited_s > 0:
            events.append(_span(1 + index, "wait", at, waited_s, cat="wait", **facts))
        events.append(_span(1 + index, name, at + waited_s, compute_s, cat="compute", **facts))
    return events


def stage_times(leg: Leg, frame: FrameTrace) -> Iterator[tuple[int, float, float, float, float]]:
    """(index, arrival of the frame, seconds of its hop, of waiting, of computing) for each stage of a lap. The arrival
    is in seconds since the request's entry."""
    hop_s = _hop_s(frame)
    at = leg.began_s + frame.sent_s
    for index, stage in enumerate(frame.stages):
        at += hop_s
        yield index, at, hop_s, stage.waited_s, stage.compute_s
        at += stage.waited_s + stage.compute_s


def _hop_s(frame: FrameTrace) -> float:
    busy_s = sum(stage.waited_s + stage.compute_s for stage in frame.stages)
    return max(0.0, frame.lap_s - busy_s) / max(1, len(frame.stages))


def waits_of(trace: RequestTrace) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of the waits of a request: "place" for a ring, then "queue" for its turn there. In seconds."""
    until = 0.0
    for leg in trace.legs:
        yield "place", until, max(until, leg.began_s)
        first_s = min((frame.sent_s for frame in leg.frames), default=0.0)
        yield "queue", leg.began_s, leg.began_s + first_s
        until = max((leg.began_s + frame.sent_s + frame.lap_s for frame in leg.frames), default=leg.began_s)


def trace_stats(trace: RequestTrace) -> dict[str, Any]:
    """Summarises the time of a request: waits before its first lap, tokens, and each stage by phase. Stages of several
    legs are merged by their place in the ring."""
    tokens = trace.tokens_s
    laps = [(leg, frame) for leg in trace.legs for frame in leg.frames]
    waits = {"place": 0.0, "queue": 0.0}
    for name, at, until in waits_of(trace):
        waits[name] += until - at
    num_stages = max((len(frame.stages) for _, frame in laps), default=0)
    return {
        **trace.describe(),
        "ttft_s": round(tokens[0], 6) if tokens else None,
        "place_s": round(waits["place"], 6),
        "queue_s": round(waits["queue"], 6),
        "token_gap_s": _summary(after - before for before, after in pairwise(tokens)),
        "lap_s": {
            "prefill": _summary(frame.lap_s for _, frame in laps if frame.is_prefill),
            "decode": _summary(frame.lap_s for _, frame in laps if not frame.is_prefill),
        },
        "stages": [_stage_stats(laps, index) for index in range(num_stages)],
    }


def _stage_stats(laps: list[tuple[Leg, FrameTrace]], index: int) -> dict[str, Any]:
    here = [(leg, frame, frame.stages[index]) for leg, frame in laps if index < len(frame.stages)]
    return {
        "stage": index,
        "peer": next((leg.peers[index] for leg, _, _ in reversed(here) if index < len(leg.peers)), ""),
        "prefill_s": _summary(span.compute_s for _, frame, span in here if frame.is_prefill),
        "decode_s": _summary(span.compute_s for _, frame, span in here if not frame.is_prefill),
        "wait_s": _summary(span.waited_s for _, _, span in here),
        "hop_s": _summary(_hop_s(frame) for _, frame, _ in here),
    }


def _summary(values: Iterable[float]) -> dict[str, float]:
    """Count, sum, mean, p50 and p95 by nearest rank, and maximum; zeros without values."""
    ordered = sorted(values)
    count, total = len(ordered), sum(ordered)
    if not count:
        return {"count": 0, "total": 0.0, "mean": 0.0, "p50": 0.0, "p95": 0.0, "max": 0.0}
    shown = {
        "total": total,
        "mean": total / count,
        "p50": ordered[(count - 1) // 2],
        "p95": ordered[-(-95 * count // 100) - 1],
        "max": ordered[-1],
    }
    return {"count": count, **{name: round(value, 6) for name, value in shown.items()}}


def _event(row: int, name: str, at_s: float) -> dict[str, Any]:
    return {"name": name, "pid": 1, "tid": row, "ts": round(at_s * 1e6, 1)}


def _span(row: int, name: str, at_s: float, seconds: float, cat: str, **args: object) -> dict[str, Any]:
    return {**_event(row, name, at_s), "ph": "X", "dur": round(seconds * 1e6, 1), "cat": cat, "args": args}


def _named(row: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}

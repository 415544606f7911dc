"""Converts a trace to OpenTelemetry spans. Names, numbers and times only: no text and no token ids.

The request is the root span; its children are waits and rings, a ring's children are laps, a lap's are stages.
Attributes of the OpenTelemetry conventions for generative AI begin with `gen_ai.`, ours with `exo_mesh.`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from exo_mesh.domain.request import FrameTrace
from exo_mesh.node.inspection.trace_formats import stage_times, waits_of
from exo_mesh.rings.serving.history import FINE, kind_of
from exo_mesh.rings.serving.traces import Leg, RequestTrace

MAX_SPANS = 256
"""About the most spans of a trace. A long answer has thousands of laps; only the first and last become spans."""

OPERATIONS = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings", "rerank": "rerank"}
"""Names of the OpenTelemetry conventions by kind of request; they have none for `rerank`."""

PROVIDER = "exo_mesh"
INTERNAL, SERVER = 1, 2
"""Kinds of spans: their numbers in the protocol."""

Value = str | int | float | Sequence[str] | Sequence[float]


class Span(msgspec.Struct, frozen=True):
    """A span. at_s, until_s: Unix seconds. peer: prefix of the id of the peer that did the work; "" for the entry peer.
    error: an error code of exo-mesh, or "". events: (name, Unix seconds)."""

    name: str
    span_id: str
    parent_id: str
    at_s: float
    until_s: float
    attributes: Mapping[str, Value] = msgspec.field(default_factory=dict)
    kind: int = INTERNAL
    peer: str = ""
    error: str = ""
    events: tuple[tuple[str, float], ...] = ()


def root_id(trace: RequestTrace) -> str:
    """The span id of the request: the id in its reply, or a derived one."""
    return trace.span_id or _derived(trace, "request")


def count_spans(trace: RequestTrace) -> int:
    """The number of spans that `spans_of` returns, without making them."""
    waits = sum(1 for _, at, until in waits_of(trace) if until > at)
    laps = sum(1 + len(frame.stages) for leg in trace.legs for frame in _shown(leg, len(trace.legs)))
    return 1 + waits + len(trace.legs) + laps


def spans_of(trace: RequestTrace, address: tuple[str, int] | None = None) -> list[Span]:
    """The spans of an ended trace, the request first. address: (host, port) of the API at which the request entered."""
    root = root_id(trace)
    spans = [_request_span(trace, root, address)]
    for number, (name, at, until) in enumerate(waits_of(trace)):
        if until > at:
            span_id = _derived(trace, f"{name} {number}")
            spans.append(Span(name, span_id, root, trace.entered + at, trace.entered + until))
    for number, leg in enumerate(trace.legs):
        ends_s = trace.legs[number + 1].began_s if number + 1 < len(trace.legs) else trace.duration_s
        spans += _ring_spans(trace, root, leg, number, max(leg.began_s, ends_s))
    return spans


def _request_span(trace: RequestTrace, span_id: str, address: tuple[str, int] | None) -> Span:
    operation = OPERATIONS[kind_of(trace.request_id)]
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.response.id": trace.names[0] if trace.names else trace.request_id,
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "gen_ai.usage.output_tokens": trace.output_tokens,
        "exo_mesh.request.id": trace.request_id,
        "exo_mesh.outcome": trace.outcome,
        "exo_mesh.rings": len(trace.legs),
    }
    attributes |= {f"gen_ai.request.{name}": value for name, value in trace.asked.items()}
    if address is not None:
        attributes |= {"server.address": address[0], "server.port": address[1]}
    events = [("exo_mesh.resumed", trace.entered + leg.began_s) for leg in trace.legs[1:]]
    if trace.tokens_s:
        attributes["gen_ai.response.time_to_first_chunk"] = round(trace.tokens_s[0], 6)
        events.insert(0, ("exo_mesh.first_token", trace.entered + trace.tokens_s[0]))
    if trace.outcome in ("stop", "length"):
        attributes["gen_ai.response.finish_reasons"] = [trace.outcome]
    error = "" if trace.outcome in FINE else trace.outcome
    if error:
        attributes["error.type"] = error
    return Span(
        f"{operation} {trace.model}",
        span_id,
        trace.parent_span_id,
        trace.entered,
        trace.entered + trace.duration_s,
        attributes,
        SERVER,
        error=error,
        events=tuple(events),
    )


def _ring_spans(trace: RequestTrace, root: str, leg: Leg, number: int, ends_s: float) -> Iterator[Span]:
    ring = _derived(trace, f"ring {number}")
    shown = _shown(leg, len(trace.legs))
    sums = [[0.0, 0.0, 0.0] for _ in range(max((len(frame.stages) for frame in leg.frames), default=0))]
    for frame in leg.frames:
        for index, _, *parts in stage_times(leg, frame):
            sums[index] = [total + part for total, part in zip(sums[index], parts, strict=True)]
    num_prefills = sum(frame.is_prefill for frame in leg.frames)
    attributes: dict[str, Value] = {
        "exo_mesh.instance.id": leg.instance_id,
        "exo_mesh.ring.peers": list(leg.peers),
        "exo_mesh.laps.prefill": num_prefills,
        "exo_mesh.laps.decode": len(leg.frames) - num_prefills,
        "exo_mesh.laps.not_shown": len(leg.frames) - len(shown),
        **{
            f"exo_mesh.stages.{name}_seconds": [round(stage[place], 6) for stage in sums]
            for place, name in enumerate(("hop", "wait", "compute"))
        },
    }
    yield Span("ring", ring, root, trace.entered + leg.began_s, trace.entered + ends_s, attributes)
    for frame in shown:
        yield from _lap_spans(trace, ring, leg, frame, f"{number} {frame.step}")


def _lap_spans(trace: RequestTrace, ring: str, leg: Leg, frame: FrameTrace, path: str) -> Iterator[Span]:
    at = trace.entered + leg.began_s + frame.sent_s
    lap = _derived(trace, f"lap {path}")
    attributes = {"exo_mesh.step": frame.step, "exo_mesh.rows": frame.rows, "exo_mesh.tokens": frame.tokens}
    name, driver = "prefill" if frame.is_prefill else "decode", leg.peers[-1] if leg.peers else ""
    yield Span(name, lap, ring, at, at + frame.lap_s, attributes, peer=driver)
    for index, arrived_s, hop_s, waited_s, compute_s in stage_times(leg, frame):
        begins = trace.entered + arrived_s
        facts = {
            "exo_mesh.stage": index,
            "exo_mesh.hop_seconds": round(hop_s, 6),
            "exo_mesh.wait_seconds": round(waited_s, 6),
            "exo_mesh.compute_seconds": round(compute_s, 6),
        }
        peer = leg.peers[index] if index < len(leg.peers) else ""
        span_id = _derived(trace, f"stage {index} of {path}")
        yield Span(f"stage {index}", span_id, lap, begins, begins + waited_s + compute_s, facts, peer=peer)


def _shown(leg: Leg, num_legs: int) -> Sequence[FrameTrace]:
    """The laps that become spans: the first and the last ones, within MAX_SPANS."""
    num_stages = max((len(frame.stages) for frame in leg.frames), default=0)
    most = max(2, MAX_SPANS // max(1, num_legs) // (1 + num_stages))
    if len(leg.frames) <= most:
        return leg.frames
    return [*leg.frames[: most - most // 2], *leg.frames[len(leg.frames) - most // 2 :]]


def _derived(trace: RequestTrace, path: str) -> str:
    """A span id derived from the request and the place of the span in it. In practice never all zeros."""
    identity = f"{trace.trace_id} {trace.request_id} {trace.entered} {path}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]

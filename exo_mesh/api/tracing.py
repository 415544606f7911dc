"""Decides which requests are traced, and their place in the trace: by W3C Trace Context headers, or at random."""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Sequence

import msgspec
from aiohttp import web


class TraceContext(msgspec.Struct, frozen=True):
    """The place of a traced request in its trace, as W3C Trace Context defines it. span_id: the span of the request
    itself. parent_span_id and state: those of the caller; "" if the trace begins here."""

    trace_id: str = ""
    span_id: str = ""
    parent_span_id: str = ""
    state: str = ""


TRACE = web.RequestKey("trace", TraceContext)
"""The trace of a traced request; the reply has it in x-trace-id and traceresponse."""

MAX_STATE_CHARS, MAX_STATE_MEMBERS = 512, 32
"""Limits of a tracestate in the standard. A longer tracestate is dropped completely."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE_MEMBER = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{1,256}")


def trace_of(parents: Sequence[str], states: Sequence[str], sample: float) -> TraceContext | None:
    """The place of a request in its trace; None if the request is not traced.

    parents, states: its traceparent and tracestate headers (https://www.w3.org/TR/trace-context/). If the traceparent
    has the sampled flag, the request is traced under the caller's trace id; without the flag it is not traced. Of the
    requests without a traceparent, a random share `sample` is traced. A malformed or repeated traceparent is ignored.
    """
    found = _TRACEPARENT.fullmatch(parents[0].strip().lower()) if len(parents) == 1 else None
    if found and found[1] != "ff" and not (found[1] == "00" and found[5]):
        if not int(found[4], 16) & 1:
            return None
        return TraceContext(found[2], secrets.token_hex(8), found[3], _state(states))
    return None if random.random() >= sample else new_trace()


def new_trace() -> TraceContext:
    """The place of a request that begins a trace."""
    return TraceContext(secrets.token_hex(16), secrets.token_hex(8))


def _state(headers: Sequence[str]) -> str:
    """The members of all tracestate headers, joined; "" if they violate the standard."""
    members = [member.strip(" \t") for member in ",".join(headers).split(",") if member.strip(" \t")]
    joined = ",".join(members)
    if len(members) > MAX_STATE_MEMBERS or len(joined) > MAX_STATE_CHARS:
        return ""
    return joined if all(_STATE_MEMBER.fullmatch(member) for member in members) else ""


def trace_headers(trace: TraceContext) -> dict[str, str]:
    """The headers of the reply to a traced request: its trace id and its span id (Trace Context, level 2)."""
    return {"x-trace-id": trace.trace_id, "traceresponse": f"00-{trace.trace_id}-{trace.span_id}-01"}

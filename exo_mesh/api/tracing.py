"""Which requests are traced, and under what id: as W3C Trace Context says, or by a draw."""

from __future__ import annotations

import random
import re
import secrets

from aiohttp import web

TRACE_ID = web.RequestKey("trace_id", str)
"""Of a request that is traced; the reply says it as x-trace-id."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")


def trace_id_of(traceparent: str, sample: float) -> str:
    """32 hex digits, or "" if the request is not traced.

    A caller whose traceparent (https://www.w3.org/TR/trace-context/) has the sampled flag gets a trace with its own id;
    of all others a share `sample` is drawn. A header that is none is as good as none.
    """
    found = _TRACEPARENT.fullmatch(traceparent.strip().lower())
    if found and not traceparent.lower().startswith("ff"):
        if int(found[2], 16) & 1:
            return found[1]
        return ""
    return secrets.token_hex(16) if random.random() < sample else ""

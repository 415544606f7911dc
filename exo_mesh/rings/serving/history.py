"""Records how requests that entered here ended: the last ones in detail, all of them in sums. Numbers and names
only."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from itertools import islice, takewhile
from statistics import quantiles
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from exo_mesh.base.printable import counted, printable
from exo_mesh.errors import InputError, MeshError

MAX_RECENT = 10_000
"""Detailed records kept; one takes about 400 bytes."""
MAX_MESSAGE_CHARS = 300
LATEST_S = 60.0
SPREAD_OF = 512
"""Latencies are computed from this many of the last requests."""

FINE = frozenset({"stop", "length", "cancelled"})
"""Outcomes that are no error; a cancelled request ended as the client wanted."""
TIMEOUTS = frozenset({"deadline_exceeded"})
"""Codes of errors for something that took too long."""


KINDS = {
    "chatcmpl-": "chat",
    "msg_": "chat",
    "resp_": "chat",
    "ollama-chat-": "chat",
    "embd-": "embedding",
    "ollama-embd-": "embedding",
    "rerank-": "rerank",
}
"""Kinds of requests by the beginning of their ids; every other request is a completion."""


def kind_of(request_id: str) -> str:
    """What a request is for, read from its id: "chat", "completion", "embedding" or "rerank"."""
    return next((kind for prefix, kind in KINDS.items() if request_id.startswith(prefix)), "completion")


class RequestOutcome(msgspec.Struct, frozen=True):
    """The end of a request. outcome: why generation stopped, or the code of its error. timed_out: it reached the time
    limit of a request, with or without tokens. is_pressure_abort: it ended with the tokens so far, because no machine
    had memory for it. ended_at: Unix seconds. memory: bytes in use on this machine, by all programs, when the request
    entered and when it ended. key_id: of the API key that the request came with; empty without one. trace_id: empty if
    the request was not traced. cached_tokens: prompt tokens that came from the prefix cache. accepted_drafts,
    rejected_drafts: drafted tokens that became output, and those that did not. error_message: what the client got,
    without its own words; empty without an error."""

    request_id: str
    model: str
    outcome: str
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    duration_s: float
    max_tokens: int = 0
    timed_out: bool = False
    is_pressure_abort: bool = False
    memory_before_bytes: int = 0
    memory_after_bytes: int = 0
    ended_at: float = 0.0
    key_id: str = ""
    trace_id: str = ""
    cached_tokens: int = 0
    error_message: str = ""
    accepted_drafts: int = 0
    rejected_drafts: int = 0

    @property
    def status(self) -> str:
        """ "ok", "timeout", "pressure_abort", "cancelled" or "error"."""
        if self.is_pressure_abort:
            return "pressure_abort"
        return "timeout" if self.timed_out else status_of(self.outcome)

    @property
    def kind(self) -> str:
        """See kind_of."""
        return kind_of(self.request_id)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of decoding, from the first token to the last; None with fewer than two tokens."""
        decoding_s = self.duration_s - (self.ttft_s or 0.0)
        return (self.output_tokens - 1) / decoding_s if self.output_tokens > 1 and decoding_s > 0 else None

    @property
    def line(self) -> str:
        """One line for the log."""
        rate = "" if self.tokens_per_s is None else f", {self.tokens_per_s:.1f} tokens/s"
        return (
            f"request {self.request_id} to {self.model}: {self.outcome} after {counted(self.prompt_tokens, 'token')} "
            f"of prompt and {self.output_tokens} of output in {self.duration_s:.1f} s{rate}"
        )

    def describe(self) -> dict[str, Any]:
        rate = self.tokens_per_s
        return {
            **{name: value for name, value in asdict(self).items() if name not in ("timed_out", "is_pressure_abort")},
            "kind": self.kind,
            "status": self.status,
            "tokens_per_s": None if rate is None else round(rate, 2),
            "memory_delta_bytes": self.memory_after_bytes - self.memory_before_bytes,
        }


def message_for_the_log(error: MeshError) -> str:
    """The text of an error without a client's words, which the message of a refused request quotes."""
    if isinstance(error, InputError):
        return f"the request was refused because of {error.param or 'a value in it'}"
    return printable(str(error), MAX_MESSAGE_CHARS)


def status_of(outcome: str) -> str:
    """ "ok", "timeout", "cancelled" or "error"."""
    if outcome in TIMEOUTS:
        return "timeout"
    if outcome == "cancelled":
        return "cancelled"
    return "ok" if outcome in FINE else "error"


class History:
    """Keeps details of the last max_recent requests, and one counter for each outcome. write: called with each outcome
    as JSON values; must return at once."""

    def __init__(
        self,
        now: Callable[[], float] = time.time,
        *,
        max_recent: int = MAX_RECENT,
        write: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._now = now
        self._began_at = now()
        self._write = write
        self._recent: deque[RequestOutcome] = deque(maxlen=max_recent)
        self._counts: Counter[str] = Counter()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, ended: RequestOutcome) -> None:
        """Record a request that has ended now."""
        ended = replace(ended, ended_at=round(self._now(), 3))
        self._recent.append(ended)
        self._counts[ended.outcome] += 1
        self._tokens += ended.output_tokens
        if self._write is not None:
            self._write(ended.describe())

    def recent(self, most: int, key_id: str | None = None) -> list[RequestOutcome]:
        """The last outcomes, newest first. With a key_id, only requests with this API key ("": without one)."""
        return list(islice((one for one in reversed(self._recent) if key_id in (None, one.key_id)), most))

    def stats(self) -> dict[str, Any]:
        """Sums since the start and of the last minute; rates and latencies of the last SPREAD_OF that went well."""
        total = sum(self._counts.values())
        errors = sum(count for outcome, count in self._counts.items() if outcome not in FINE)
        fine = [ended for ended in self.recent(SPREAD_OF) if ended.outcome in ("stop", "length")]
        rates = [rate for ended in fine if (rate := ended.tokens_per_s) is not None]
        now = self._now()
        latest = list(takewhile(lambda ended: ended.ended_at > now - LATEST_S, reversed(self._recent)))
        return {
            "uptime_s": round(now - self._began_at, 1),
            "last_minute": {
                "requests": len(latest),
                "errors": sum(ended.outcome not in FINE for ended in latest),
                "output_tokens": sum(ended.output_tokens for ended in latest),
            },
            "total": total,
            "errors": errors,
            "error_rate": round(errors / total, 4) if total else 0.0,
            "outcomes": dict(sorted(self._counts.items())),
            "output_tokens": self._tokens,
            "avg_tokens_per_s": round(sum(rates) / len(rates), 2) if rates else None,
            "latency_s": _spread([ended.duration_s for ended in fine]),
            "ttft_s": _spread([ended.ttft_s for ended in fine if ended.ttft_s is not None]),
        }


def _spread(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    if len(seconds) == 1:
        return {"p50": seconds[0], "p95": seconds[0]}
    cuts = quantiles(seconds, n=20, method="inclusive")
    return {"p50": round(cuts[9], 4), "p95": round(cuts[18], 4)}

"""How requests that entered here have ended: the last ones in detail, all of them in sums. Numbers and names only."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

MAX_RECENT = 512

FINE = frozenset({"stop", "length", "cancelled"})
"""Outcomes that are no error: the last is what the client wanted."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. ended_at: Unix seconds."""

    request_id: str
    model: str
    outcome: str
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    duration_s: float
    ended_at: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Of decoding: from the first token to the last; None with fewer than two."""
        decoding_s = self.duration_s - (self.ttft_s or 0.0)
        return (self.output_tokens - 1) / decoding_s if self.output_tokens > 1 and decoding_s > 0 else None

    def describe(self) -> dict[str, Any]:
        rate = self.tokens_per_s
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "tokens_per_s": None if rate is None else round(rate, 2),
        }


class History:
    """Bounded: details of the last MAX_RECENT, one counter for each outcome."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._recent: deque[Outcome] = deque(maxlen=MAX_RECENT)
        self._counts: Counter[str] = Counter()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._recent)

    def add(
        self,
        request_id: str,
        model: str,
        outcome: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
        ttft_s: float | None,
        duration_s: float,
    ) -> None:
        """One has ended, now."""
        ended = Outcome(request_id, model, outcome, prompt_tokens, output_tokens, ttft_s, duration_s, self._now())
        self._recent.append(ended)
        self._counts[outcome] += 1
        self._tokens += output_tokens

    def recent(self, most: int) -> list[Outcome]:
        """The last ones, newest first."""
        return list(self._recent)[::-1][:most]

    def stats(self) -> dict[str, Any]:
        """Sums since the start; rates and latencies of the last MAX_RECENT that went well."""
        total = sum(self._counts.values())
        errors = sum(count for outcome, count in self._counts.items() if outcome not in FINE)
        fine = [ended for ended in self._recent if ended.outcome in ("stop", "length")]
        rates = [rate for ended in fine if (rate := ended.tokens_per_s) is not None]
        return {
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

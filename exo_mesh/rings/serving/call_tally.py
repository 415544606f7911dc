"""Sums up how the requests of one call ended, so that the history has one entry for the call."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from exo_mesh.rings.serving.history import FINE, RequestOutcome


class CallTally:
    """Collects the ends of the requests that one call consists of. `close` records their sum under the id of the call.

    The first error decides the outcome; a cancelled request does so only if no request failed, because an error cancels
    the requests that still run. The time is that of the longest request after the first one has begun.
    """

    def __init__(self, call_id: str) -> None:
        self._call_id = call_id
        self._sum: RequestOutcome | None = None
        self._began_at = 0.0
        self._record: Callable[[RequestOutcome], None] | None = None

    def add(self, ended: RequestOutcome, entered_at: float, record: Callable[[RequestOutcome], None]) -> None:
        """Add the end of a request that entered at entered_at (monotonic seconds). record: takes the sum in the end."""
        self._record = record
        if self._sum is None:
            self._sum, self._began_at = replace(ended, request_id=self._call_id), entered_at
            return
        before, began_at = self._sum, min(self._began_at, entered_at)
        firsts = [
            at + one.ttft_s - began_at
            for one, at in ((before, self._began_at), (ended, entered_at))
            if one.ttft_s is not None
        ]
        worst = max(before, ended, key=_severity)  # the earlier one of two that are equally bad
        self._sum = replace(
            before,
            outcome=worst.outcome,
            error_message=worst.error_message,
            timed_out=worst.timed_out,
            is_pressure_abort=before.is_pressure_abort or ended.is_pressure_abort,
            prompt_tokens=before.prompt_tokens + ended.prompt_tokens,
            output_tokens=before.output_tokens + ended.output_tokens,
            max_tokens=before.max_tokens + ended.max_tokens,
            cached_tokens=before.cached_tokens + ended.cached_tokens,
            accepted_drafts=before.accepted_drafts + ended.accepted_drafts,
            rejected_drafts=before.rejected_drafts + ended.rejected_drafts,
            ttft_s=min(firsts, default=None),
            duration_s=max(self._began_at + before.duration_s, entered_at + ended.duration_s) - began_at,
            memory_after_bytes=ended.memory_after_bytes,
        )
        self._began_at = began_at

    def close(self) -> None:
        """Record the sum, once; nothing if no request of the call began."""
        if self._sum is not None and self._record is not None:
            self._record(self._sum)
        self._sum = self._record = None


def _severity(ended: RequestOutcome) -> int:
    if ended.outcome not in FINE:
        return 2
    return 1 if ended.outcome == "cancelled" else 0

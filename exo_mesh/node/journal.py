"""What the entry peer must keep of each live request to go on with it elsewhere. Kept in memory only, never logged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from exo_mesh.clock import Clock, monotonic
from exo_mesh.domain.request import GenerateRequest, TokenEvent
from exo_mesh.errors import InputError, OverloadError, TransportError
from exo_mesh.node.history import History
from exo_mesh.node.traces import Trace

MAX_LIVE = 1024
"""Requests that one entry peer holds; its own memory bounds this, not the rings."""


MAX_SHOWN = 128


@dataclass(slots=True)
class Entry:
    """One live request: what was asked, what came out. `cancel` is set while somebody can be told to stop."""

    request: GenerateRequest
    model: str
    entered_at: float
    emitted: list[int] = field(default_factory=list)
    cancelled: bool = False
    on_cancel: Callable[[], object] | None = None
    last_token_at: float | None = None
    trace: Trace | None = None
    instance_id: str = ""
    """Where it runs now."""

    @property
    def state(self) -> str:
        """placing: it waits for a ring. waiting: for its turn there, or its prompt is being computed. generating."""
        if not self.instance_id:
            return "placing"
        return "generating" if self.last_token_at is not None else "waiting"

    @property
    def resumption(self) -> GenerateRequest:
        """The request that continues after what was emitted; the seed is the same, so sampling goes on as it would."""
        return replace(self.request, resume_ids=(*self.request.resume_ids, *self.emitted))

    @property
    def next_index(self) -> int:
        return len(self.request.resume_ids) + len(self.emitted)

    def accept(self, event: TokenEvent) -> bool:
        """Note an event; False for a repeat, which is to be dropped. Raises TransportError if one is missing."""
        if event.index < self.next_index:
            return False
        if event.index > self.next_index:
            raise TransportError(f"the driver skipped from token {self.next_index} to token {event.index}")
        if event.token_id is not None:
            self.emitted.append(event.token_id)
        return True


class Journal:
    """The live requests of this entry peer, by id, and how others ended."""

    def __init__(self, max_live: int = MAX_LIVE, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._live: dict[str, Entry] = {}
        self._max_live = max_live
        self.history = History()

    def __len__(self) -> int:
        return len(self._live)

    def open(self, request: GenerateRequest, model: str, now: float) -> Entry:
        """Begin. Raises InputError if the id is in use, OverloadError if there is no room."""
        if request.request_id in self._live:
            raise InputError(f"a request {request.request_id} is running already", param="request_id")
        if len(self._live) >= self._max_live:
            raise OverloadError(f"{len(self._live)} requests are live on this peer already")
        entry = self._live[request.request_id] = Entry(request, model, now)
        return entry

    def close(self, entry: Entry, outcome: str, ttft_s: float | None, now: float) -> None:
        """End, however it ended."""
        self._live.pop(entry.request.request_id, None)
        self.history.add(
            entry.request.request_id,
            entry.model,
            outcome,
            prompt_tokens=len(entry.request.prompt_ids),
            output_tokens=len(entry.emitted),
            ttft_s=ttft_s,
            duration_s=now - entry.entered_at,
        )

    def describe_live(self) -> list[dict[str, Any]]:
        """What runs, for people who look for what hangs: the oldest first."""
        now = self._clock()
        shown = []
        for entry in list(self._live.values())[:MAX_SHOWN]:
            last = entry.last_token_at
            shown.append(
                {
                    "request_id": entry.request.request_id,
                    "model": entry.model,
                    "state": entry.state,
                    "instance": entry.instance_id,
                    "prompt_tokens": len(entry.request.prompt_ids),
                    "output_tokens": entry.next_index,
                    "age_s": round(now - entry.entered_at, 3),
                    "since_last_token_s": None if last is None else round(now - last, 3),
                }
            )
        return shown

    def outstanding(self) -> Counter[str]:
        """Live requests by instance."""
        return Counter(entry.instance_id for entry in self._live.values() if entry.instance_id)

    def cancel(self, request_id: str) -> bool:
        """Ask a live request to end; False if there is none of this id."""
        entry = self._live.get(request_id)
        if entry is None:
            return False
        entry.cancelled = True
        if entry.on_cancel is not None:
            entry.on_cancel()
        return True

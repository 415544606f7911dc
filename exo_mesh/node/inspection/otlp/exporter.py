"""Sends ended traces to a collector in the background, with limits and deadlines, without delaying requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from exo_mesh import __version__
from exo_mesh.base.authorities import trusted
from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.printable import printable
from exo_mesh.base.tasks import ChangeSignal
from exo_mesh.errors import TransportError
from exo_mesh.node.inspection.otlp.encoding import CONTENT_TYPES, JSON, Origin, encode, refused_spans
from exo_mesh.node.inspection.otlp.spans import count_spans
from exo_mesh.rings.serving.traces import RequestTrace

MAX_WAITING = 128
"""Most traces that wait to be sent; beyond it, the oldest is dropped."""
BATCH_SPANS = 512
"""A batch with this many spans takes no further trace."""
LINGER_S = 1.0
"""Time for which a batch waits for more traces."""
POST_S = 10.0
"""Deadline of one attempt."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
MAX_RETRY_AFTER_S = 60.0
GIVE_UP_S = 300.0
"""Time for which a batch is retried."""
CLOSE_S = 1.0
"""Time for which a stopping node tries to send the remaining traces."""
MAX_REPLY_BYTES = 64 << 10

RETRYABLE = frozenset({429, 502, 503, 504})
"""HTTP statuses after which the protocol allows a retry."""

SENT, REFUSED, UNREACHABLE, QUEUE_FULL, STOPPED = "sent", "refused", "unreachable", "queue_full", "stopped"
"""Outcomes of a span."""

_log = logging.getLogger(__name__)


class _RetryError(TransportError):
    """The same batch may succeed later. after_s: the collector's Retry-After, or None."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


@dataclass(frozen=True, slots=True)
class CollectorTarget:
    """A collector. tls: trusts the CA of the collector's certificate; None: the system's CAs."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    protocol: str = JSON
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """The URL without user, password and query, which may be secret."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}".partition("?")[0]


class _Batch(msgspec.Struct):
    traces: list[RequestTrace]
    num_spans: int
    since: float


class TraceExporter:
    """Exports traces. `offer` queues a trace; `keep` sends them until cancelled; `close` sends the rest.

    origin: returns the current origin of the spans. count: called with an outcome and a number of spans.
    """

    def __init__(
        self,
        target: CollectorTarget,
        origin: Callable[[], Origin],
        count: Callable[[str, int], object] = lambda outcome, number: None,
        clock: Clock = monotonic,
        linger_s: float = LINGER_S,
    ) -> None:
        self.target = target
        self._origin = origin
        self._report = count
        self._clock = clock
        self._linger_s = linger_s
        self._waiting: deque[tuple[RequestTrace, int]] = deque()
        self._batch: _Batch | None = None
        self._offered = ChangeSignal()
        self._trouble = ""
        self._counts: dict[str, int] = {}

    def offer(self, trace: RequestTrace) -> None:
        """Queues a trace, which must not change any more."""
        if len(self._waiting) >= MAX_WAITING:
            _, num_spans = self._waiting.popleft()
            self._count(QUEUE_FULL, num_spans)
        self._waiting.append((trace, count_spans(trace)))
        self._offered.beat()

    def describe(self) -> dict[str, Any]:
        """The state of the export, for people."""
        lost = sum(number for outcome, number in self._counts.items() if outcome != SENT)
        waiting = sum(number for _, number in self._waiting) + (self._batch.num_spans if self._batch else 0)
        return {
            "endpoint": self.target.shown,
            "protocol": self.target.protocol,
            "sent": self._counts.get(SENT, 0),
            "dropped": lost,
            "waiting": waiting,
            "error": self._trouble,
        }

    async def keep(self) -> None:
        """Sends queued traces until cancelled."""
        async with self._session() as session:
            while True:
                if not self._waiting and self._batch is None:
                    await self._offered.wait(LAST_RETRY_S)
                    continue
                if self._batch is None:
                    await asyncio.sleep(self._linger_s)
                    self._batch = self._take()
                await self._deliver(session, self._batch)
                self._batch = None

    async def close(self, within_s: float = CLOSE_S) -> None:
        """Tries once to send the rest after `keep` was cancelled; spans that are not sent in time count as lost."""
        with contextlib.suppress(TransportError, TimeoutError):
            async with asyncio.timeout(within_s), self._session() as session:
                while self._batch or self._waiting:
                    self._batch = self._batch or self._take()
                    await self._post(session, self._batch)
                    self._batch = None
        left = sum(number for _, number in self._waiting) + (self._batch.num_spans if self._batch else 0)
        if left:
            self._count(STOPPED, left)
            _log.warning("dropped %d spans of traces that were not sent before the node stopped", left)
        self._waiting.clear()
        self._batch = None

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        headers = {
            "User-Agent": f"exo-mesh/{__version__}",
            **self.target.headers,
            "Content-Type": CONTENT_TYPES[self.target.protocol],
        }
        timeout = aiohttp.ClientTimeout(total=POST_S)
        connector = aiohttp.TCPConnector(limit=1, ssl=self.target.tls or await trusted())
        async with aiohttp.ClientSession(
            headers=headers, timeout=timeout, connector=connector, trust_env=True
        ) as session:
            yield session

    def _take(self) -> _Batch:
        batch = _Batch([], 0, self._clock())
        while self._waiting and batch.num_spans < BATCH_SPANS:
            trace, num_spans = self._waiting.popleft()
            batch.traces.append(trace)
            batch.num_spans += num_spans
        return batch

    async def _deliver(self, session: aiohttp.ClientSession, batch: _Batch) -> None:
        """Sends a batch with retries, or gives it up after GIVE_UP_S."""
        pause_s = FIRST_RETRY_S
        while True:
            try:
                return await self._post(session, batch)
            except _RetryError as exc:
                self._note_trouble(str(exc))
                wait_s = pause_s * random.uniform(0.8, 1.2) if exc.after_s is None else exc.after_s
            if self._clock() + wait_s - batch.since > GIVE_UP_S:
                return self._count(UNREACHABLE, batch.num_spans)
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, LAST_RETRY_S)

    async def _post(self, session: aiohttp.ClientSession, batch: _Batch) -> None:
        """Makes one attempt to send a batch. Raises _RetryError if a retry may help."""
        protocol = self.target.protocol
        body = await asyncio.to_thread(encode, batch.traces, self._origin(), protocol, _breathe)
        try:
            async with session.post(self.target.url, data=body, allow_redirects=False) as reply:
                text = await reply.content.read(MAX_REPLY_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            raise _RetryError(f"{type(exc).__name__}: {printable(str(exc), 200)}") from exc
        if reply.status in RETRYABLE:
            raise _RetryError(
                f"the collector answered HTTP {reply.status}", _retry_after(reply.headers.get("Retry-After", ""))
            )
        if not 200 <= reply.status < 300:
            said = printable(text[:200].decode("utf-8", "replace"), 200)
            self._note_trouble(f"the collector rejected them with HTTP {reply.status}: {said}")
            return self._count(REFUSED, batch.num_spans)
        refused, why = refused_spans(text, protocol)
        refused = max(0, min(refused, batch.num_spans))
        self._count(SENT, batch.num_spans - refused)
        if refused:
            self._count(REFUSED, refused)
            self._note_trouble(f"the collector rejected {refused} of {batch.num_spans} spans: {printable(why, 200)}")
        elif self._trouble:
            self._trouble = ""
            _log.info("sending traces to %s works again", self.target.shown)

    def _note_trouble(self, what: str) -> None:
        if what != self._trouble:
            self._trouble = what
            _log.warning("cannot send traces to %s: %s; requests continue", self.target.shown, what)

    def _count(self, outcome: str, num_spans: int) -> None:
        self._counts[outcome] = self._counts.get(outcome, 0) + num_spans
        self._report(outcome, num_spans)


def _breathe() -> None:
    """Releases the interpreter lock for the event loop, which a computing thread would delay by 5 ms each time."""
    time.sleep(0.0002)


def _retry_after(text: str) -> float | None:
    """Seconds of a Retry-After header, at most MAX_RETRY_AFTER_S; None for a date or no number."""
    return min(float(text), MAX_RETRY_AFTER_S) if text.strip().isdigit() else None

"""Routes a request from its entry here to an instance, and its tokens back."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from exo_mesh.base.clock import Clock
from exo_mesh.base.tasks import Watchdog
from exo_mesh.base.telemetry.request_metrics import RequestMeter, RequestMetrics
from exo_mesh.domain.request import FinishReason, GenerateRequest, RequestEvent, TokenEvent
from exo_mesh.errors import MeshError, code_of
from exo_mesh.rings.serving.answer_stages import AnsweredRequest
from exo_mesh.rings.serving.dispatcher import Dispatcher
from exo_mesh.rings.serving.history import FINE, message_for_the_log
from exo_mesh.rings.serving.journal import Journal, JournalEntry
from exo_mesh.rings.serving.live import LiveStreams
from exo_mesh.rings.serving.request_run import Patience, RequestRun, RunState
from exo_mesh.rings.serving.traces import TraceStore


class Router:
    """Runs each request to its one end, and keeps its journal, metrics and trace."""

    def __init__(
        self,
        rings: Dispatcher,
        journal: Journal,
        metrics: RequestMetrics,
        patience: Patience,
        live: LiveStreams,
        traces: TraceStore,
        clock: Clock,
    ) -> None:
        self._rings = rings
        self._journal = journal
        self._live = live
        self._metrics = metrics
        self._patience = patience
        self._clock = clock
        self._watchdog = Watchdog(clock=clock)
        self.traces = traces

    async def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[RequestEvent, None]:
        """Run a request; see RequestService.generate."""
        entry = self._journal.open(request, model, self._clock())
        if request.trace_id:
            num_prompt = len(request.prompt_ids)
            entry.trace = self.traces.open(request, model, num_prompt, entry.entered_at)
        meter = self._metrics.enter(model)
        outcome = "cancelled"
        live = self._live.choice(request.request_id)
        run = RequestRun(entry, self._rings, self._patience, meter)
        self._watchdog.watch(run.check)
        try:
            while run.state is not RunState.ENDED:
                for event in await run.step():
                    if isinstance(event, TokenEvent):
                        if event.token_id is not None or event.piece is not None:
                            self._count_token(entry, meter)
                        if event.finish is not None:
                            outcome = str(event.finish)
                    if live is not None:
                        self._live.add(live, event)
                    yield event
        except MeshError as exc:
            outcome, entry.error_message = exc.code, message_for_the_log(exc)
            if live is not None:
                live.end(exc)
            raise
        except Exception as exc:  # our own mistake; the API answers with the same code
            outcome, entry.error_message = code_of(exc), f"internal error ({type(exc).__name__})"
            if live is not None:
                live.end(MeshError(entry.error_message))
            raise
        finally:
            self._watchdog.forget(run.check)
            try:
                await run.aclose()
            finally:
                self._account(entry, meter, outcome)

    def answered(self, request_id: str, key_id: str | None = None) -> AnsweredRequest | None:
        """The rings that compute or have computed a request, live or among the last ended ones. With a key_id, a
        request that came with another API key ("": without one) is not found."""
        if (entry := self._journal.live(request_id)) is not None:
            self._rings.complete_legs(entry)
        found = self._journal.ended.find(request_id) if entry is None else entry.answered
        return found if found is not None and key_id in (None, found.key_id) else None

    def _account(self, entry: JournalEntry, meter: RequestMeter, outcome: str) -> None:
        """Record how a request ended."""
        now = self._clock()
        num_prompt, latency_s = entry.num_prompt_tokens, now - entry.entered_at
        if outcome in set(FinishReason):
            self._rings.answered(entry)
        meter.ended(outcome, num_prompt, latency_s, is_error=outcome not in FINE)
        self._rings.complete_legs(entry)
        self._journal.close(entry, outcome, now)
        if entry.request.keep_alive_s is not None and entry.instance_id:
            self._rings.instances.keep_alive(entry.instance_id, entry.request.keep_alive_s)
        if entry.trace is not None:
            self.traces.end(entry.trace, outcome, now)

    def _count_token(self, entry: JournalEntry, meter: RequestMeter) -> None:
        now = self._clock()
        last, entry.last_token_at = entry.last_token_at, now
        if entry.legs.awaits_token:
            entry.legs.came(None if last is None else now - last)
            self._rings.complete_legs(entry)
        if entry.trace is not None:
            entry.trace.token(now)
        if last is None:
            entry.ttft_s = now - entry.entered_at
            meter.first_token(entry.ttft_s)
        else:
            meter.next_token(now - last)

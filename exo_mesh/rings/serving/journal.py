"""Keeps what the entry peer needs to continue each live request elsewhere. In memory only, never logged."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from itertools import groupby, takewhile
from typing import Any

import msgspec
from msgspec.structs import replace

from exo_mesh.base.clock import Clock, monotonic
from exo_mesh.base.printable import counted
from exo_mesh.base.tasks import ChangeSignal
from exo_mesh.domain.replay import Kept, Output, ReplayStore, output_of
from exo_mesh.domain.request import FLEX_PRIORITY, GenerateRequest, PrefixReport, PromptLogprobs, TextBridge, TokenEvent
from exo_mesh.domain.whole.text_pieces import Respelling, TextPiece, TextUsage, rest_of
from exo_mesh.errors import (
    CancelledRequestError,
    EngineError,
    InputError,
    MeshError,
    NodeStoppingError,
    OverloadError,
    SupersededError,
    TransportError,
)
from exo_mesh.rings.serving.answer_stages import AnsweredRequest, AnsweredRequests, AnswerLegs
from exo_mesh.rings.serving.explanations import Explanations, explain
from exo_mesh.rings.serving.history import History, RequestOutcome
from exo_mesh.rings.serving.traces import RequestTrace
from exo_mesh.wire.control_driver import DriverCall

MAX_LIVE = 1024
"""Most requests that one entry peer holds; its own memory sets this limit, not the rings."""

MAX_SHOWN = 128

END_S = 0.5
"""Seconds that cancelled requests may take to end when the node stops: they have one event left to send."""

_log = logging.getLogger(__name__)


class Wait(msgspec.Struct):
    """What a live request waits for, if it does: some work, or a message of its driver."""

    work: asyncio.Future[Any] | None = None
    call: DriverCall | None = None

    def interrupt(self, error: Exception) -> None:
        """Ends the wait: the work is cancelled, and the next message of the driver is this error."""
        if self.work is not None:
            self.work.cancel()
        if self.call is not None:
            self.call.interrupt(error)


class JournalEntry(msgspec.Struct):
    """One live request: its input, its output so far, and what it waits for."""

    request: GenerateRequest
    model: str
    entered_at: float
    emitted: list[Output] = msgspec.field(default_factory=list)
    """Its output so far: token ids, and pieces of text where an engine gave text. Before the token ids that follow
    such pieces it says which tokens stand for them."""
    cancelled: bool = False
    wait: Wait = msgspec.field(default_factory=Wait)
    last_token_at: float | None = None
    ttft_s: float | None = None
    """Seconds from its entry to its first token."""
    trace: RequestTrace | None = None
    timed_out: bool = False
    error_message: str = ""
    memory_before_bytes: int = 0
    instance_id: str = ""
    """The instance that serves it now; empty if none does."""
    had_instance: bool = False
    """Whether an instance was found for it before, which is lost since."""
    kept: Kept | None = None
    """Where its events are kept, if the client gave an idempotency key."""
    superseded: bool = False
    is_pressure_abort: bool = False
    """Whether it ended with the tokens so far, because no machine had memory for it."""
    is_cut_by_stop: bool = False
    """Whether the node cut it off, because the node stops and has waited long enough."""
    scored: int = 0
    """Log-probabilities of prompt tokens that were passed on to the client."""
    usage: TextUsage | None = None
    """Its tokens as its engine counted them, at the end of an answer as text."""
    _skew: int = 0
    """How many more events were emitted than the present leg counts from: ids and pieces are not one to one."""
    _respelling: Respelling | None = None
    """What the next token of the present leg follows, if that stands for text and was not passed on yet."""
    cached_tokens: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    """Prompt tokens that came from the prefix cache of its first ring."""
    prefix: PrefixReport | None = None
    """Where its prompt parts from what its ring keeps, as the driver has said."""
    prefilled: int = 0
    """Prompt tokens that its present ring has computed, as far as the driver has reported it."""
    legs: AnswerLegs = msgspec.field(default_factory=AnswerLegs)
    """The rings that computed it, one after the other."""

    @property
    def answered(self) -> AnsweredRequest:
        """What is remembered of the rings that computed it."""
        return AnsweredRequest(self.request.request_id, self.model, self.request.key_id, self.legs)

    def is_called(self, wanted: str) -> bool:
        """Whether `wanted` is an id of this request, or of all its choices, that a client saw."""
        asked = self.request
        return bool(wanted) and wanted in (asked.request_id, asked.share_id, asked.trace_id, *asked.names)

    @property
    def is_new(self) -> bool:
        """Whether nothing was done for it yet: it had no instance, and none of its tokens was emitted."""
        return not (self.had_instance or self.next_index)

    @property
    def state(self) -> str:
        """ "placing": it waits for a ring. "waiting": for its turn there, or its prompt is being computed.
        "generating"."""
        if not self.instance_id:
            return "placing"
        return "generating" if self.last_token_at is not None else "waiting"

    def resumption(self, *, as_text: bool) -> GenerateRequest:
        """The request that continues after the emitted output; the seed is the same, so sampling continues alike.
        as_text: for an engine that takes text.

        Missing log-probabilities of the prompt are requested together with those before them, which `accept_prompt`
        drops. Raises EngineError if the output cannot be converted for this kind of engine.
        """
        if as_text:
            return self._as_text()
        wanted = self.request.prompt_logprobs if self.scored < self.request.num_scores else None
        ids, begins_with = self._as_ids(), ""
        self._respelling = None
        if ids is None:
            self._respelling = self._bridge.respelling(self._pieces())
            ids, begins_with = self._respelling.ids, self._respelling.spelling
        resume_ids = (*self.request.resume_ids, *ids)
        self._skew = self.next_index + (self._respelling is not None) - len(resume_ids)
        return dataclasses.replace(
            self.request, resume_ids=resume_ids, begins_with=begins_with, prompt_logprobs=wanted, text=None
        )

    def _as_ids(self) -> tuple[int, ...] | None:
        """The tokens of the output so far; None if text came since the last ones, or if the tokens may not have spelled
        all of the text before them yet."""
        last, since = self._since_respelling()
        ids = tuple(item for item in since if isinstance(item, int))
        if len(ids) < len(since) or len(ids) < len(last.spelling.encode()):  # a token spells a byte or more
            return None
        return (*last.ids, *ids)

    def _since_respelling(self) -> tuple[Respelling, list[Output]]:
        """The last statement which tokens stand for text, and the output after it."""
        for at in range(len(self.emitted) - 1, -1, -1):
            item = self.emitted[at]
            if isinstance(item, Respelling):
                return item, self.emitted[at + 1 :]
        return Respelling(()), self.emitted

    def take_respelling(self) -> list[TokenEvent]:
        """The event to pass on before the first token of the present leg; empty if there is none."""
        if self._respelling is None:
            return []
        event = TokenEvent(self.next_index, None, respelling=self._respelling)
        self._respelling = None
        self._add(event)
        return [event]

    def _as_text(self) -> GenerateRequest:
        assert self.request.text is not None, "an instance was chosen that takes text"
        begun = (*self.request.text.begun, *self._pieces())
        self._skew, self._respelling = self.next_index - len(begun), None
        text = replace(self.request.text, begun=begun)
        return dataclasses.replace(self.request, prompt_ids=(), resume_ids=(), text=text)

    def _pieces(self) -> tuple[TextPiece, ...]:
        """The emitted output as text."""
        found: list[TextPiece] = []
        begun: Respelling | None = None
        for kind, items in groupby(self.emitted, type):
            if kind is int:
                ids = [item for item in items if isinstance(item, int)]
                if begun is None:
                    found += self._bridge.pieces_of(ids)
                else:
                    found += rest_of(self._bridge.pieces_of((*begun.ids, *ids)), found)
                continue
            for item in items:
                if isinstance(item, TextPiece):
                    found.append(item)
                elif isinstance(item, Respelling):
                    begun = item
        return tuple(found)

    @property
    def _bridge(self) -> TextBridge:
        if self.request.bridge is None:
            raise EngineError("this answer cannot continue: the mesh has no tokenizer of the model that began it")
        return self.request.bridge

    @property
    def next_index(self) -> int:
        return len(self.request.resume_ids) + len(self.emitted)

    @property
    def num_prompt_tokens(self) -> int:
        """As the engine counted them, if it gave text; 0 while nobody has counted them."""
        if self.usage is not None and self.usage.prompt_tokens is not None:
            return self.usage.prompt_tokens
        return len(self.request.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        """As the engine counted them, if it gave text; a piece counts as a token before that."""
        if self.usage is not None and self.usage.output_tokens is not None:
            return self.usage.output_tokens
        last, since = self._since_respelling()
        return len(last.ids) + len(since)

    def accept(self, event: TokenEvent) -> bool:
        """Record an event; False for a repeated event, which the caller must drop. Raises TransportError if one is
        missing."""
        index = event.index + self._skew
        if index < self.next_index:
            return False
        if index > self.next_index:
            raise TransportError(f"the driver skipped from token {self.next_index} to token {index}")
        self._add(event)
        if event.cached:
            self.cached_tokens = min(event.cached, len(self.request.prompt_ids))
        return True

    def _add(self, event: TokenEvent) -> None:
        if (output := output_of(event)) is not None:
            self.emitted.append(output)
        self.usage = event.usage or self.usage
        self.accepted_drafts, self.rejected_drafts = event.accepted, event.rejected
        if self.kept is not None and not self.superseded:
            self.kept.add(event)

    def accept_prompt(self, event: PromptLogprobs) -> PromptLogprobs | None:
        """Record log-probabilities of the prompt; returns the new ones. Raises TransportError if some are missing."""
        entries = tuple(entry for entry in event.entries if entry.index > self.scored)
        if entries and entries[0].index != self.scored + 1:
            raise TransportError(f"the driver skipped from prompt token {self.scored} to {entries[0].index}")
        self.scored += len(entries)
        if self.kept is not None and not self.superseded:
            self.kept.prompt += entries
        return PromptLogprobs(entries) if entries else None

    def replay(self) -> list[TokenEvent | PromptLogprobs]:
        """The events of an earlier answer under the same key; they count as emitted from now on."""
        if self.kept is None:
            return []
        self.kept.meet(())
        self.scored = len(self.kept.prompt)
        if self.scored < self.request.num_scores:
            self.kept.reopen()
        events = self.kept.events(0)
        for event in events:
            if (output := output_of(event)) is not None:
                self.emitted.append(output)
            self.usage = event.usage or self.usage
        return [*([PromptLogprobs(tuple(self.kept.prompt))] if self.scored else []), *events]

    @property
    def end_error(self) -> MeshError:
        """The error that the request ends with once it is cancelled."""
        if self.superseded:
            return SupersededError("the same request was sent again; the newer call continues it")
        if self.is_cut_by_stop:
            same = " with the same Idempotency-Key" if self.request.key_hash else ""
            return NodeStoppingError(
                f"this node is stopping; send the request to another peer{same} to continue it there"
            )
        return CancelledRequestError(f"request {self.request.request_id} was cancelled")


class Journal:
    """The live requests of this entry peer, by id, and how earlier ones ended. used_bytes: memory in use here."""

    def __init__(
        self,
        max_live: int = MAX_LIVE,
        history: History | None = None,
        used_bytes: Callable[[], int] = lambda: 0,
        clock: Clock = monotonic,
    ) -> None:
        self._clock = clock
        self._emptied = ChangeSignal()
        self._live: dict[str, JournalEntry] = {}
        self._by_key: dict[bytes, JournalEntry] = {}
        self._replays = ReplayStore()
        self._max_live = max_live
        self._used_bytes = used_bytes
        self.history = History() if history is None else history
        self.explanations = Explanations()
        self.ended = AnsweredRequests()

    def __len__(self) -> int:
        return len(self._live)

    def open(self, request: GenerateRequest, model: str, now: float) -> JournalEntry:
        """Add a request; an earlier one with the same idempotency key ends. Raises InputError if the id is in use,
        KeyReusedError if the key was used for another request, OverloadError if there is no room."""
        before = self._by_key.get(request.key_hash)
        running = self._live.get(request.request_id)
        if running is not None and running is not before:
            raise InputError(f"a request {request.request_id} is running already", param="request_id")
        if len(self._live) >= self._max_live:
            raise OverloadError(
                f"{counted(len(self._live), 'live request')} on this peer, the most that it takes; send the request to "
                "another peer, or retry later"
            )
        kept = self._replays.open(request, now) if request.key_hash else None
        if before is not None:
            self._supersede(before)
        entry = self._live[request.request_id] = JournalEntry(
            request, model, now, memory_before_bytes=self._used_bytes(), kept=kept
        )
        if kept is not None:
            self._by_key[request.key_hash] = entry
        return entry

    def _supersede(self, entry: JournalEntry) -> None:
        entry.superseded = True
        if self._live.get(entry.request.request_id) is entry:
            del self._live[entry.request.request_id]
        self._cancel(entry)

    def close(self, entry: JournalEntry, outcome: str, now: float) -> None:
        """Remove a request and record its outcome, or leave that to the call that it is a part of."""
        if self._live.get(entry.request.request_id) is entry:
            del self._live[entry.request.request_id]
        if not self._live:
            self._emptied.beat()
        if entry.kept is not None and self._by_key.get(entry.request.key_hash) is entry:
            del self._by_key[entry.request.key_hash]
            self._replays.close(entry.kept, now)
        ended = RequestOutcome(
            entry.request.request_id,
            entry.model,
            outcome,
            prompt_tokens=entry.num_prompt_tokens,
            output_tokens=entry.num_output_tokens,
            ttft_s=entry.ttft_s,
            duration_s=now - entry.entered_at,
            max_tokens=entry.request.max_tokens,
            timed_out=entry.timed_out,
            is_pressure_abort=entry.is_pressure_abort,
            memory_before_bytes=entry.memory_before_bytes,
            memory_after_bytes=self._used_bytes(),
            key_id=entry.request.key_id,
            trace_id=entry.request.trace_id,
            cached_tokens=entry.cached_tokens,
            error_message=entry.error_message,
            accepted_drafts=entry.accepted_drafts,
            rejected_drafts=entry.rejected_drafts,
        )
        if entry.request.tally is None:
            self._record(ended)
        else:
            entry.request.tally.add(ended, entry.entered_at, self._record)
        if entry.prefix is not None:
            explanation = explain(entry.request, entry.model, entry.prefix, ended)
            self.explanations.add(explanation, entry.request.names)
        self.ended.add(entry.answered, (*entry.request.names, entry.request.share_id, entry.request.trace_id))

    def _record(self, ended: RequestOutcome) -> None:
        self.history.add(ended)
        _log.info("%s", ended.line)

    def live(self, request_id: str) -> JournalEntry | None:
        """The live request with this id."""
        return next((entry for entry in self._live.values() if entry.is_called(request_id)), None)

    def states(self) -> Counter[str]:
        """How many live requests are in which state."""
        return Counter(entry.state for entry in self._live.values())

    def describe_live(self) -> list[dict[str, Any]]:
        """The live requests, oldest first, for people who look for a request that hangs."""
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

    def instances_of(self, share_id: str) -> set[str]:
        """The instances on which live choices of one request run; empty for a request with one choice."""
        if not share_id:
            return set()
        return {entry.instance_id for entry in self._live.values() if entry.request.share_id == share_id}

    def place_in_line(self, entry: JournalEntry) -> int:
        """How many live requests of its model and kind (flex or not) have come before a request and still wait for
        their first instance. All choices of a request are one."""
        before = takewhile(lambda one: one is not entry, self._live.values())
        waiting = {
            one.request.share_id or one.request.request_id
            for one in before
            if one.model == entry.model
            and one.is_new
            and not one.instance_id
            and (one.request.priority <= FLEX_PRIORITY) == (entry.request.priority <= FLEX_PRIORITY)
        }
        return len(waiting - {entry.request.share_id})

    def on_instances(self) -> dict[str, list[JournalEntry]]:
        """The live requests by instance, oldest first."""
        found: dict[str, list[JournalEntry]] = {}
        for entry in self._live.values():
            if entry.instance_id:
                found.setdefault(entry.instance_id, []).append(entry)
        return found

    def waiting_on(self, instance_id: str) -> list[JournalEntry]:
        """The live requests on an instance that have no token yet, oldest first."""
        return [one for one in self._live.values() if one.instance_id == instance_id and one.last_token_at is None]

    def outstanding(self) -> Counter[str]:
        """Live requests by instance."""
        return Counter(entry.instance_id for entry in self._live.values() if entry.instance_id)

    def cancel(self, request_id: str, key_id: str | None = None) -> bool:
        """Ask a live request to end, with all its choices; False if no live request has this id. With a key_id, a
        request that came with another API key ("": without one) is ignored."""
        found = [
            entry
            for entry in list(self._live.values())
            if entry.is_called(request_id) and key_id in (None, entry.request.key_id)
        ]
        for entry in found:
            self._cancel(entry)
        return bool(found)

    def cancel_on(self, instance_id: str, request_id: str = "") -> int:
        """Ask the live requests on an instance to end, or only those with an id; returns how many."""
        found = [
            entry
            for entry in list(self._live.values())
            if entry.instance_id == instance_id and (not request_id or entry.is_called(request_id))
        ]
        for entry in found:
            self._cancel(entry)
        return len(found)

    async def finish(self, grace_s: float) -> None:
        """Wait before a stop until no request is live, at most grace_s."""
        if self._live:
            live = counted(len(self._live), "request")
            _log.info("stopping: %s that entered here may continue for up to %g s", live, grace_s)
        await self._wait_until_empty(grace_s)

    async def cut(self) -> None:
        """End every live request because this node stops, and wait until their clients have been notified."""
        if self._live:
            _log.warning("stopping ends %s; another peer can go on", counted(len(self._live), "request"))
        for entry in list(self._live.values()):
            entry.is_cut_by_stop = True
            self._cancel(entry)
        await self._wait_until_empty(END_S)

    async def _wait_until_empty(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        while self._live and loop.time() < give_up_at:
            await self._emptied.wait(give_up_at - loop.time())

    def _cancel(self, entry: JournalEntry) -> None:
        entry.cancelled = True
        entry.wait.interrupt(entry.end_error)

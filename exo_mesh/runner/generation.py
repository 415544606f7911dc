"""One request inside the driver: its sequence, its sampler, its output so far, and what its caller is told."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from exo_mesh.domain.frame import Frame, Row
from exo_mesh.domain.replay import Kept
from exo_mesh.domain.request import FinishReason, FrameTrace, GenerateRequest, PromptLogprob, StageSpan, TokenEvent
from exo_mesh.errors import MeshError, OverloadError
from exo_mesh.proto import driver_pb2 as pb
from exo_mesh.proto import plan_pb2
from exo_mesh.runner.constraint import Constraint
from exo_mesh.runner.mailbox import Mailbox
from exo_mesh.runner.prompt_logprobs import score
from exo_mesh.runner.sampler import Draw, Sampler
from exo_mesh.runner.scheduler import Sequence
from exo_mesh.transport.driver_codec import event_to_proto, prompt_to_proto, traces_to_proto

MAX_LAPS = 1024
"""Laps of a traced request that wait to be sent: the last ones, about 100 bytes each."""

LAPS_AT_ONCE = 16
"""So many are sent together, for the trace of a request that fails or is cancelled has no more than was sent."""


class Drawn(NamedTuple):
    """What one row of logits led to: output tokens in order, the first one drawn and the others forced, and why the
    request ends, if it does."""

    draws: tuple[Draw, ...]
    finish: FinishReason | None = None

    def events(self, index: int) -> list[TokenEvent]:
        """The events for the caller. index: of the first token. A stop is an event of its own, without a token."""
        numbered = enumerate(self.draws, index)
        events = [TokenEvent(at, draw.token_id, draw.logprob, tuple(draw.top)) for at, draw in numbered]
        if self.finish is FinishReason.LENGTH and events:
            events[-1] = replace(events[-1], finish=self.finish)
        elif self.finish is not None:
            events.append(TokenEvent(index + len(events), None, finish=self.finish))
        return events


@dataclass(slots=True)
class Generation:
    """Lives from submit to its end. `index` counts output tokens, those of an earlier plan included.
    submitted_at: seconds of `time.perf_counter`."""

    request: GenerateRequest
    sequence: Sequence
    sampler: Sampler
    mailbox: Mailbox
    index: int
    queued: bool = False
    """Its caller was told that it waits."""
    submitted_at: float = field(default_factory=time.perf_counter)
    laps: deque[FrameTrace] = field(default_factory=partial(deque, maxlen=MAX_LAPS))
    kept: Kept | None = None
    """Where its output is kept, if the client gave an idempotency key."""
    constraint: Constraint | None = None
    """What holds its output, if anything does."""
    constrained: bool = False
    """The constraint has been asked for what comes first."""
    forced: list[int] = field(default_factory=list)
    """What comes first, while a row is on its way whose logits are of no use then."""
    late: np.ndarray | None = None
    """Logits that came round before it was known what may come next."""

    @staticmethod
    def begin(request: GenerateRequest, sequence_id: int, mailbox: Mailbox) -> Generation:
        """Prompt and already emitted tokens are context; the sampler counts the latter as output."""
        sampler = Sampler(request)
        tokens = [*request.prompt_ids, *request.resume_ids]
        sequence = Sequence(sequence_id, tokens, request.client, request.priority, request.resumed)
        sequence.share_id, sequence.num_shared = request.share_id, len(request.prompt_ids) - 1
        sequence.draws, sequence.scores = request.max_tokens > 0, request.num_scores
        return Generation(request, sequence, sampler, mailbox, len(request.resume_ids))

    @property
    def max_positions(self) -> int:
        """KV positions that the sequence can come to hold."""
        return len(self.request.prompt_ids) + self.request.max_tokens

    def note_lap(self, frame: Frame, sent_at: float, lap_s: float) -> None:
        """Keep what a frame with a row of this request took, if it is traced. sent_at: of `time.perf_counter`."""
        if self.request.trace_id:
            stages = tuple(StageSpan(report.waited_s, report.compute_s) for report in frame.reports)
            sent_s = sent_at - self.submitted_at
            lap = FrameTrace(frame.step, frame.is_prefill, len(frame.rows), len(frame.token_ids), sent_s, lap_s, stages)
            self.laps.append(lap)

    def take_laps(self) -> tuple[FrameTrace, ...]:
        """The laps since the last call."""
        taken = tuple(self.laps)
        self.laps.clear()
        return taken

    def begin_anew(self, sequence_id: int) -> None:
        """Go on as another sequence, which shares no prompt: the stages' KV of the one before is worthless."""
        old = self.sequence
        self.sequence = Sequence(
            sequence_id,
            old.tokens,
            old.client,
            old.priority,
            resumed=True,
            parked=old.parked,
            num_shared=old.num_shared,
            draws=old.draws,
            scores=old.scores,
            scored=old.scored,
        )

    def take_kept(self, kept: Kept | None) -> None:
        """Keep its output there; what is kept of its prompt is not sent again."""
        self.kept = kept
        if kept is not None:
            self.sequence.scored = min(len(kept.prompt), self.sequence.scores)

    @property
    def is_done(self) -> bool:
        """Nothing is to be drawn, and what was wanted of the prompt has been sent."""
        return not self.sequence.draws and not self.sequence.wants_scores

    def score(self, row: Row, logits: np.ndarray) -> list[PromptLogprob]:
        """The log-probabilities of prompt tokens by a prefill row that have not been sent yet. logits: of the last
        positions of the row. Raises EngineError if they are no numbers."""
        sequence = self.sequence
        first = row.pos0 + row.n - len(logits)
        start, stop = max(sequence.scored, first), min(row.pos0 + row.n, sequence.scores)
        if start >= stop:
            return []
        assert first <= sequence.scored, "frames come round in order"
        token_ids = sequence.tokens[start + 1 : stop + 1]
        entries = score(logits[start - first : stop - first], token_ids, start + 1, self.request.prompt_logprobs or 0)
        sequence.scored = stop
        return entries

    def draw(self, logits: np.ndarray) -> Drawn:
        """Draw the next token from float32 `[vocab]` logits, and add those that must follow it.

        A stop id that was drawn is not output: `index` stays. Raises EngineError if there is nothing to draw from, and
        what the constraint raises.
        """
        if self.constraint is None:
            allowed = None
        elif (allowed := self.constraint.allowed()) is not None and self.constraint.is_complete:
            return Drawn((), FinishReason.STOP)
        draw = self.sampler.draw(logits, self.index, allowed)
        if draw.token_id in self.request.stop_ids and not self.request.ignore_eos:
            return Drawn((), FinishReason.STOP)
        self.index += 1
        if self.constraint is None:
            return Drawn((draw,), FinishReason.LENGTH if self.index >= self.request.max_tokens else None)
        self.constraint.accept(draw.token_id)
        return self.add((draw,), self.follow())

    def follow(self) -> list[int]:
        """Tokens that must come next. Raises what the constraint raises."""
        assert self.constraint is not None, "nothing must come"
        return self.constraint.follow(self.request.max_tokens - self.index)

    def add(self, draws: tuple[Draw, ...], forced: Ordered[int]) -> Drawn:
        """Make tokens that must come output, behind others that are."""
        assert self.constraint is not None, "nothing must come"
        for token_id in forced:
            self.sampler.add(token_id)
        self.index += len(forced)
        draws += tuple(map(Draw, forced))
        if self.constraint.is_complete:
            return Drawn(draws, FinishReason.STOP)
        return Drawn(draws, FinishReason.LENGTH if self.index >= self.request.max_tokens else None)


def token_events(ballot: plan_pb2.Ballot, index: int, drawn: Drawn) -> pb.GenerateEvents:
    """The message with tokens and the end; all of one row go together, so that a caller who loses the
    driver knows all or none of them. index: of the first one."""
    return pb.GenerateEvents(ballot=ballot, events=map(event_to_proto, drawn.events(index)))


def end_events(ballot: plan_pb2.Ballot, index: int) -> pb.GenerateEvents:
    """The end of a request that draws nothing."""
    return pb.GenerateEvents(ballot=ballot, events=[pb.TokenEvent(index=index, finish=FinishReason.LENGTH)])


def prompt_events(ballot: plan_pb2.Ballot, entries: Iterable[PromptLogprob]) -> pb.GenerateEvents:
    """Log-probabilities of prompt tokens; one piece of them is one message."""
    return pb.GenerateEvents(ballot=ballot, prompt=prompt_to_proto(entries))


def trace_events(ballot: plan_pb2.Ballot, laps: Iterable[FrameTrace]) -> pb.GenerateEvents:
    """What a traced request went through since the last of these events."""
    return pb.GenerateEvents(ballot=ballot, trace=traces_to_proto(laps))


def prefill_events(ballot: plan_pb2.Ballot, tokens: int) -> pb.GenerateEvents:
    """How many prompt tokens have been computed."""
    return pb.GenerateEvents(ballot=ballot, prefilled=tokens)


def queue_events(
    ballot: plan_pb2.Ballot, place: int, length: int = 0, wait_s: float | None = None
) -> pb.GenerateEvents:
    """Which place a request has in a queue of `length`, and how long until its turn; place 0: it waits no longer."""
    return pb.GenerateEvents(ballot=ballot, queued=place, queue_length=length, wait_s=wait_s or 0.0)


def error_events(ballot: plan_pb2.Ballot, error: MeshError) -> pb.GenerateEvents:
    """The end of a request that failed."""
    wait_s = error.retry_after_s if isinstance(error, OverloadError) else 0.0
    return pb.GenerateEvents(ballot=ballot, error_code=error.code, error_message=str(error), wait_s=wait_s)

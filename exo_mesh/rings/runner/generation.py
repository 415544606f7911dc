"""One request inside the driver: its sequence, sampler, output so far, and the messages to its caller."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Ordered
from functools import partial

import msgspec
import numpy as np

from exo_mesh.domain.embedding import EmbedSpec
from exo_mesh.domain.frame import Frame, Row
from exo_mesh.domain.replay import Kept
from exo_mesh.domain.request import (
    FinishReason,
    FrameTrace,
    GenerateRequest,
    PromptLogprob,
    StageSpan,
)
from exo_mesh.errors import InputError
from exo_mesh.rings.runner.constraint import Constraint
from exo_mesh.rings.runner.drafting.foresight import Foresight
from exo_mesh.rings.runner.mailbox import Drawn, Mailbox
from exo_mesh.rings.runner.pooled import PooledVector
from exo_mesh.rings.runner.sampling.prompt_logprobs import score
from exo_mesh.rings.runner.sampling.sampler import Draw, Sampler
from exo_mesh.rings.runner.scheduling.sequence import Sequence

MAX_LAPS = 1024
"""Laps of a traced request kept until they are sent: the newest ones, about 100 bytes each."""

LAPS_AT_ONCE = 16
"""Laps sent in one message. The trace of a request that fails or is cancelled ends with the laps that were sent."""


class Generation(msgspec.Struct):
    """The state of one request in the driver, from submit to its end. `index` counts output tokens, including tokens
    from an earlier plan. submitted_at: seconds of `time.perf_counter`."""

    request: GenerateRequest
    sequence: Sequence
    sampler: Sampler
    mailbox: Mailbox
    index: int
    queued: bool = False
    """Whether the caller got a message that the request waits."""
    submitted_at: float = msgspec.field(default_factory=time.perf_counter)
    laps: deque[FrameTrace] = msgspec.field(default_factory=partial(deque, maxlen=MAX_LAPS))
    kept: Kept | None = None
    """Where the output is kept, if the client gave an idempotency key."""
    constraint: Constraint | None = None
    """The grammar or thinking budget that limits the output, if there is one."""
    constrained: bool = False
    """Whether the constraint has been asked for the first forced tokens."""
    forced: list[int] = msgspec.field(default_factory=list)
    """Forced first tokens that wait for a row on its way; the logits of that row are not used."""
    is_compared: bool = False
    """Whether the caller has got the position at which the prompt departs from kept sequences."""
    cached: int = 0
    """Prompt tokens that were copied from another request instead of computed."""
    late: list[tuple[int, np.ndarray]] = msgspec.field(default_factory=list)
    """Logits that came round before the allowed tokens were known, and their first positions."""
    vector: PooledVector | None = None
    """The vector of the prompt so far, if the request wants one."""
    foresight: Foresight | None = None
    """Its guesses of the next tokens, if it drafts."""

    @staticmethod
    def begin(request: GenerateRequest, sequence_id: int, mailbox: Mailbox) -> Generation:
        """Start a request: prompt and already emitted tokens are context, and the sampler counts the latter as
        output."""
        sampler = Sampler(request)
        tokens = [*request.prompt_ids, *request.resume_ids]
        sequence = Sequence(sequence_id, tokens, request.client, request.priority, request.resumed)
        sequence.prompt = sequence.num_shared = len(request.prompt_ids) - 1
        sequence.share_id = request.share_id
        sequence.draws, sequence.scores = request.max_tokens > 0, request.num_scores
        sequence.pictures = tuple(picture.spec for picture in request.pictures)
        sequence.is_kept, sequence.cache_scope = request.is_kept, request.cache_scope
        generation = Generation(request, sequence, sampler, mailbox, len(request.resume_ids))
        if request.embed is not None:
            _prepare_vector(sequence, request.embed)
            generation.vector = PooledVector(request.embed)
        return generation

    @property
    def may_draft(self) -> bool:
        """Whether guesses may be sent now: not before the output begins that a grammar or a text decides."""
        return self.constraint is None or (self.constrained and not self.forced)

    @property
    def max_positions(self) -> int:
        """The most KV positions that the sequence can hold."""
        return len(self.request.prompt_ids) + self.request.max_tokens

    def note_lap(self, frame: Frame, sent_at: float, lap_s: float, *, is_prefill: bool) -> None:
        """Keep the timing of a frame with a row of this request, if the request is traced. sent_at: of
        `time.perf_counter`."""
        if self.request.trace_id:
            stages = tuple(StageSpan(report.waited_s, report.compute_s) for report in frame.reports)
            sent_s = sent_at - self.submitted_at
            lap = FrameTrace(frame.step, is_prefill, len(frame.rows), len(frame.token_ids), sent_s, lap_s, stages)
            self.laps.append(lap)

    def take_laps(self) -> tuple[FrameTrace, ...]:
        """Take the laps since the last call."""
        taken = tuple(self.laps)
        self.laps.clear()
        return taken

    def begin_anew(self, sequence_id: int) -> None:
        """Continue as another sequence that shares no prompt: the stages' KV of the old sequence is not usable."""
        old = self.sequence
        self.sequence = Sequence(
            sequence_id,
            old.tokens,
            old.client,
            old.priority,
            resumed=True,
            parked=old.parked,
            num_shared=old.num_shared,
            prompt=old.prompt,
            draws=old.draws,
            scores=old.scores,
            scored=old.scored,
            is_kept=old.is_kept,
            embeds=old.embeds,
            is_whole=old.is_whole,
            second=old.second,
            judges=old.judges,
            cache_scope=old.cache_scope,
            pictures=old.pictures,
        )
        self.cached = 0

    def take_kept(self, kept: Kept | None) -> None:
        """Keep the output in `kept`; prompt log-probabilities that are kept already are not sent again."""
        self.kept = kept
        if kept is not None:
            self.sequence.scored = min(len(kept.prompt), self.sequence.scores)

    @property
    def is_done(self) -> bool:
        """Whether nothing is to be drawn and all log-probabilities of the prompt have been sent."""
        return not self.sequence.draws and not self.sequence.wants_scores

    def score(self, row: Row, logits: np.ndarray) -> list[PromptLogprob]:
        """The log-probabilities of the prompt tokens in a prefill row that have not been sent yet. logits: of the last
        positions of the row. Raises EngineError if they are not numbers."""
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

    def pool(self, row: Row, hidden: np.ndarray) -> bytes | None:
        """Add the hidden states of a prefill row to the vector; returns the vector once it is complete. hidden: of the
        last positions of the row. Raises EngineError if they are not numbers."""
        assert self.vector is not None, "the request wants a vector"
        sequence = self.sequence
        first, stop = row.pos0 + row.n - len(hidden), row.pos0 + row.n
        if stop <= sequence.scored:
            return None
        assert first <= sequence.scored, "frames come round in order"
        self.vector.add(hidden[sequence.scored - first :])
        sequence.scored = stop
        return None if sequence.wants_scores else self.vector.result()

    def judge(self, row: Row, logits: np.ndarray) -> bytes | None:
        """As `pool`, for a score from logits, `[num_logits, vocab]`. Raises InputError for a token that the model does
        not have."""
        assert self.request.embed is not None, "the request wants a score"
        choice = self.request.embed.choice
        if max(choice) >= logits.shape[1]:
            raise InputError(f"token {max(choice)} is not one of the model's {logits.shape[1]}")
        scores = logits[:, choice[:1]] - (logits[:, choice[1:]] if choice[1:] else 0)
        return self.pool(row, scores)

    def draw(self, logits: np.ndarray) -> Drawn:
        """Draw the next token from float32 `[vocab]` logits, and add the tokens that must follow it.

        A stop id that was drawn is not output: `index` stays. Raises EngineError if there is no token to draw, and
        whatever the constraint raises.
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
        """The tokens that must come next. Raises what the constraint raises."""
        assert self.constraint is not None, "nothing must come"
        return self.constraint.follow(self.request.max_tokens - self.index)

    def add(self, draws: tuple[Draw, ...], forced: Ordered[int]) -> Drawn:
        """Append forced tokens to the drawn ones; all of them become output."""
        assert self.constraint is not None, "nothing must come"
        for token_id in forced:
            self.sampler.add(token_id)
        self.index += len(forced)
        draws += tuple(map(Draw, forced))
        if self.constraint.is_complete:
            return Drawn(draws, FinishReason.STOP)
        return Drawn(draws, FinishReason.LENGTH if self.index >= self.request.max_tokens else None)


def _prepare_vector(sequence: Sequence, spec: EmbedSpec) -> None:
    """Set what a sequence wants of its prompt: hidden states, of all tokens or of one."""
    num_tokens = len(sequence.tokens)
    sequence.embeds, sequence.is_whole, sequence.second = True, spec.whole, spec.second
    sequence.judges = bool(spec.choice)
    sequence.is_kept = False  # texts seldom begin alike, and an encoder keeps nothing
    sequence.scores = 1 if spec.pooling == "first" else num_tokens
    sequence.scored = num_tokens - 1 if spec.pooling in ("last", "score") else 0

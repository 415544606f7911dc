"""Turns the logits and hidden states of a frame into tokens, log-probabilities, vectors and scores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np

from exo_mesh.domain.frame import Frame, Row
from exo_mesh.domain.request import FinishReason, TokenEvent, Tokens
from exo_mesh.errors import InputError, MeshError
from exo_mesh.rings.runner.callers import Callers
from exo_mesh.rings.runner.constraint import Constraint
from exo_mesh.rings.runner.drafting.drafts import Drafts
from exo_mesh.rings.runner.generation import LAPS_AT_ONCE, Generation
from exo_mesh.rings.runner.grammars import Grammars
from exo_mesh.rings.runner.mailbox import PARK_AT, Drawn
from exo_mesh.rings.runner.sampling.prompt_logprobs import max_logit_rows, pieces
from exo_mesh.rings.runner.scheduling.scheduler import Scheduler


class Outputs:
    """Draws tokens and pools vectors, and sends them to the callers. A sequence then takes its next step, or ends.

    A constraint (grammar or thinking budget) may become ready after the prompt is computed: logits wait until then.

    live: all requests of the driver, by sequence; only read. grammars: None if this driver cannot apply constraints.
    end: ends a request, with an error or well. pump: starts frames, after an output that came between two frames.
    tokens, prompts: output tokens and computed prompts so far; laps_saved: tokens that took no lap of their own.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        live: Mapping[int, Generation],
        callers: Callers,
        grammars: Grammars | None,
        end: Callable[[int, MeshError | None], None],
        pump: Callable[[], None],
        drafts: Drafts,
    ) -> None:
        self._scheduler = scheduler
        self._live = live
        self._callers = callers
        self._grammars = grammars
        self._end = end
        self._pump = pump
        self._drafts = drafts
        self.tokens = 0
        self.prompts = 0
        self.laps_saved = 0

    def draw(self, frame: Frame, logits: np.ndarray, stale: Collection[int] = ()) -> None:
        """Take the logits of the rows that want them, float32 `[sum(num_logits), vocab]`: draw tokens from them, or
        score the positions of a row if they are of a prompt. stale: sequences whose rows follow a refused draft."""
        stop, self._drafts.num_ids = 0, logits.shape[-1]
        for row in frame.rows:
            stop += row.num_logits
            if row.num_logits and (generation := self._live.get(row.sequence)) is not None:
                if generation.vector is not None:
                    self._pool_one(generation, row, None, logits[stop - row.num_logits : stop])
                elif row.pos0 < generation.sequence.scores and not generation.sequence.ends_with(row):
                    self._score(generation, row, logits[stop - row.num_logits : stop])
                elif row.sequence not in stale:
                    self._judge(generation, row.pos0 + row.n - row.num_logits, logits[stop - row.num_logits : stop])

    def pool(self, frame: Frame, hidden: np.ndarray | None) -> None:
        """Take the hidden states of rows that want them, float32 `[sum(num_hidden), width]`, and send each vector that
        is complete. hidden: None if the engine gives none, which ends those requests."""
        stop = 0
        for row in frame.rows:
            stop += row.num_hidden
            if row.num_hidden and (generation := self._live.get(row.sequence)) is not None:
                states = None if hidden is None else hidden[stop - row.num_hidden : stop]
                self._pool_one(generation, row, states)

    def constrain(self, generation: Generation) -> None:
        """Attach a grammar, a thinking budget or a text to begin with to a request that asks for one, as soon as it is
        ready; the prompt is computed meanwhile."""
        request = generation.request
        is_free = request.grammar is None and request.thinking is None and not request.begins_with
        if is_free or not generation.sequence.draws:
            return
        if self._grammars is None:
            self._end(generation.sequence.id, InputError("this driver cannot apply grammars or thinking budgets"))
            return
        generation.constraint = Constraint(request, self._grammars)
        if generation.constraint.is_ready and request.grammar is None:
            self._begin_output(generation)
        else:
            generation.constraint.when_ready(partial(self._begin_output, generation))

    def finish_empty(self, generation: Generation) -> None:
        """Send the end of a request that draws nothing."""
        end = TokenEvent(generation.index, None, finish=FinishReason.LENGTH)
        if generation.kept is not None:
            generation.kept.add(end)
        self._callers.tell_laps(generation)
        self._callers.tell(generation, Tokens((end,)))

    def _pool_one(
        self, generation: Generation, row: Row, states: np.ndarray | None, logits: np.ndarray | None = None
    ) -> None:
        """Take what a row gave for a vector or a score, and send the result once it is complete."""
        try:
            if logits is not None:
                vector = generation.judge(row, logits)
            elif states is not None:
                vector = generation.pool(row, states)
            else:
                raise InputError("the engine of the last stage does not give hidden states of this model")
        except MeshError as exc:
            self._end(row.sequence, exc)
            return
        if vector is not None:
            self.prompts += 1
            self._callers.tell_laps(generation)
            self._callers.tell(generation, Tokens((TokenEvent(0, None, finish=FinishReason.STOP, vector=vector),)))
            self._end(row.sequence, None)

    def _score(self, generation: Generation, row: Row, logits: np.ndarray) -> None:
        """Send the log-probabilities of the prompt, and the end if nothing is to be drawn."""
        self._scheduler.max_logit_rows = max_logit_rows(logits.shape[1])
        try:
            entries = generation.score(row, logits)
        except MeshError as exc:
            self._end(generation.sequence.id, exc)
            return
        if generation.kept is not None:
            generation.kept.prompt += entries
        for piece in pieces(entries):
            self._callers.tell(generation, piece)
        if generation.is_done:
            self.finish_empty(generation)
            self._end(generation.sequence.id, None)
        elif generation.constraint is not None and generation.constraint.is_ready and not generation.constrained:
            self._begin_output(generation)

    def _judge(self, generation: Generation, first: int, logits: np.ndarray) -> None:
        """Draw the tokens after the positions from `first` on, float32 `[positions, vocab]`, until a draft at one of
        them is refused: the other logits are then of a text that was not drawn. Positions whose next token is known are
        passed over."""
        sequence, refusals = generation.sequence, generation.sequence.refusals
        if generation.late:  # of the positions before
            generation.late.append((first, logits.copy()))
            return
        for index, position in enumerate(range(first, first + len(logits))):
            if position + 1 < len(sequence.tokens):
                continue
            constraint = generation.constraint
            is_known = constraint is None or (generation.constrained and constraint.is_ready)
            if not is_known and not generation.forced:
                generation.late.append((position, logits[index:].copy()))
                sequence.is_judging = True
                if generation.constrained and constraint is not None:
                    constraint.when_ready(partial(self._draw_late, generation))
                return
            self._draw_one(generation, logits[index])
            if sequence.refusals > refusals or self._live.get(sequence.id) is not generation:
                return

    def _draw_one(self, generation: Generation, logits: np.ndarray) -> None:
        if generation.forced:  # known by now, and the logits are of the token before them
            forced, generation.forced = generation.forced, []
            self._put_out(generation, generation.add((), forced), num_drawn=0)
            return
        try:
            drawn = generation.draw(logits)
        except MeshError as exc:
            self._end(generation.sequence.id, exc)
            return
        self._put_out(generation, drawn, num_drawn=1)

    def _put_out(self, generation: Generation, drawn: Drawn, *, num_drawn: int) -> None:
        """Send tokens to the caller, and let the sequence continue or end. num_drawn: how many of the tokens took a
        lap."""
        index = generation.index - len(drawn.draws)
        token_ids = [draw.token_id for draw in drawn.draws]
        self._drafts.came(generation, token_ids)
        if not index and generation.cached:
            drawn = drawn._replace(cached=generation.cached)
        if drawn.finish and (foresight := generation.foresight) is not None:
            drawn = drawn._replace(accepted=foresight.accepted, rejected=foresight.drafted - foresight.accepted)
        self.tokens += len(drawn.draws)
        self.prompts += not index and bool(drawn.draws)
        self.laps_saved += max(0, len(drawn.draws) - num_drawn)
        if generation.kept is not None:
            for event in drawn.events(index):
                generation.kept.add(event)
        if generation.laps:
            self._callers.tell_laps(generation, 1 if drawn.finish else LAPS_AT_ONCE)
        self._callers.tell(generation, drawn, index)
        if drawn.finish:
            self._end(generation.sequence.id, None)
            return
        self._scheduler.token_drawn(generation.sequence, *token_ids)
        self._drafts.prepare(generation)
        if generation.mailbox.backlog >= PARK_AT:
            generation.mailbox.parked = generation.sequence.parked = True

    def _begin_output(self, generation: Generation) -> None:
        """Start the constrained output, now that the grammar is compiled. Forced first tokens are output now, or after
        the row that is on its way; in any case after the log-probabilities of the prompt."""
        if self._live.get(generation.sequence.id) is not generation or generation.sequence.wants_scores:
            return
        if generation.constrained:
            return  # the end of the scores came before the news that the grammar is ready
        generation.constrained = True
        try:
            forced = generation.follow()
        except MeshError as exc:
            self._end(generation.sequence.id, exc)
            forced = []
        else:
            self._put_first(generation, forced)
        self._pump()

    def _put_first(self, generation: Generation, forced: list[int]) -> None:
        assert generation.constraint is not None, "it has begun"
        if generation.constraint.is_complete or (forced and not generation.sequence.decoding):
            self._put_out(generation, generation.add((), forced), num_drawn=0)
        else:
            generation.forced = forced
            self._drafts.prepare(generation)
        if generation.late:
            self._draw_late(generation)

    def _draw_late(self, generation: Generation) -> None:
        """Draw from logits that waited until the allowed tokens were known."""
        late, generation.late = generation.late, []
        if late and self._live.get(generation.sequence.id) is generation:
            generation.sequence.is_judging = False
            refusals = generation.sequence.refusals
            for first, logits in late:
                is_live = self._live.get(generation.sequence.id) is generation  # the row before may have ended it
                if is_live and generation.sequence.refusals == refusals:
                    self._judge(generation, first, logits)
            self._pump()

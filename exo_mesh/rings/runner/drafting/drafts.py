"""Drafts of all requests at one driver: what to send ahead, and whether it pays."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from exo_mesh.domain.frame import LONGEST_DRAFT, StageReport
from exo_mesh.rings.runner.drafting.acceptance import Acceptance
from exo_mesh.rings.runner.drafting.foresight import DraftTally, Foresight
from exo_mesh.rings.runner.drafting.sources import SourceMaker
from exo_mesh.rings.runner.drafting.worth import Worth
from exo_mesh.rings.runner.generation import Generation
from exo_mesh.rings.runner.scheduling.pace import Pace
from exo_mesh.rings.runner.scheduling.sequence import Sequence as RingSequence
from exo_mesh.rings.runner.scheduling.sequence import Work

_log = logging.getLogger(__name__)


class Drafts:
    """See Drafter in scheduling/decode_rows.py. live: all requests of the driver; only read. make_source: makes what a
    request's guesses come from; None: nothing is drafted."""

    def __init__(self, live: Mapping[int, Generation], pace: Pace, make_source: SourceMaker | None) -> None:
        self._live = live
        self._make_source = make_source
        self.pace = pace
        self.acceptance = Acceptance()
        self.cuts_back = 0
        """Positions that every stage can cut back: so many drafts of a sequence may be unjudged."""
        self.cuts_at_rows = False
        """See Capabilities; of any stage. Accepted tokens in a row with a refused draft are then sent again."""
        self.num_ids = 0
        """Token ids that the model has, as its logits say: none is drafted before they are known, and no other."""
        self.tally = DraftTally()
        self.worth = Worth()

    def change(self, pace: Pace) -> None:
        """Continue on another ring, whose stages have not reported yet."""
        self.pace, self.cuts_back, self.worth = pace, 0, Worth()

    def learn(self, reports: Iterable[StageReport]) -> None:
        """Note how far the stages can cut KV back."""
        reports = list(reports)
        self.cuts_back = min(report.cuts_back for report in reports)
        self.cuts_at_rows = any(report.cuts_at_rows for report in reports)

    def begin(self, generation: Generation) -> None:
        """Let a request draft, if it wants and this driver drafts."""
        request = generation.request
        if self._make_source is not None and request.drafts and request.max_tokens > 1:
            source = self._make_source(request)
            generation.foresight = Foresight(source, Acceptance(self.acceptance), self.tally)

    def propose(self, sequence: RingSequence, num_decoding: int, most: int) -> Sequence[int]:
        """See Drafter."""
        generation = self._live.get(sequence.id)
        foresight = None if generation is None else generation.foresight
        if generation is None or foresight is None or not generation.may_draft:
            return ()
        num_ahead = len(sequence.ahead)
        left = generation.request.max_tokens - generation.index - 1
        unjudged = num_ahead + (1 + sequence.forced if self.cuts_at_rows else 0)
        most = min(most, self.cuts_back - unjudged, left - num_ahead)
        if (constraint := generation.constraint) is not None and constraint.limits_drafts:
            most = min(most, len(constraint.foreseen) - num_ahead)
        if most <= 0 or not (share := self._look(generation, foresight)):
            return ()
        num_tokens, num_frames = self.pace.drafts(num_decoding, share)
        if not self.worth.may_draft or sequence.on_way >= num_frames:
            return ()
        wanted = num_tokens if sequence.on_way else num_tokens - 1
        draft = list(takewhile(self.num_ids.__gt__, foresight.expected[num_ahead : num_ahead + min(most, wanted)]))
        foresight.drafted += len(draft)
        return draft

    def prepare(self, generation: Generation) -> None:
        """Let the grammar of a request look at what comes next, and at the guesses that may be sent soon."""
        constraint, foresight = generation.constraint, generation.foresight
        if constraint is None:
            return
        guesses: list[int] = []
        is_drafting = foresight is not None and self.cuts_back and self.worth.may_draft and not generation.forced
        if is_drafting and foresight is not None and constraint.limits_drafts:
            share = self._look(generation, foresight)
            num_tokens, num_frames = self.pace.drafts(1, share) if share else (1, 1)
            guesses = foresight.expected[: min(num_tokens * num_frames - 1, LONGEST_DRAFT)]
        constraint.prepare(guesses)

    def _look(self, generation: Generation, foresight: Foresight) -> float:
        """See Foresight.look. A request whose drafter fails goes on without drafts."""
        try:
            return foresight.look(generation.sequence)
        except Exception:  # noqa: BLE001 - logged; no request may end because of a guess
            _log.exception("request %s goes on without drafts: its drafter failed", generation.request.request_id)
            generation.foresight = None
            return 0.0

    def came_round(self, work: Work, now: float, rows: int, tokens: int) -> None:
        """Note a frame that came round while `rows` sequences decode, and the tokens that it gave. now: seconds of any
        one clock."""
        if self._make_source is None:
            return
        if work.is_prefill:
            self.worth.begin(now)
        elif work.rows:
            drafted = work.goes_ahead or any(row.num_logits > 1 for row in work.rows)
            self.worth.note(now, rows, tokens, drafted=drafted)

    def came(self, generation: Generation, token_ids: Sequence[int]) -> None:
        """Judge the guesses of a request by the tokens that came. Before its sequence takes these."""
        if (foresight := generation.foresight) is not None:
            foresight.came(token_ids, len(generation.sequence.ahead))

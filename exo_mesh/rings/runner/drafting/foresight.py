"""What one request is expected to say next, and how often such guesses are right. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import msgspec

from exo_mesh.domain.frame import LONGEST_DRAFT
from exo_mesh.domain.runner.heartbeat import DRAFT_POSITIONS
from exo_mesh.rings.runner.drafting.acceptance import Acceptance, kind_of
from exo_mesh.rings.runner.scheduling.sequence import Sequence as RingSequence

FORESEEN = LONGEST_DRAFT
"""Tokens that a drafter is asked for at once."""


class DraftSource(Protocol):
    """Makes guesses for one sequence; knows neither frames nor rows."""

    def draft(self, tokens: Sequence[int], ahead: Sequence[int], most: int) -> tuple[list[int], int]:
        """Up to `most` tokens that may come after `tokens` and `ahead`, the drafts before them, and how many tokens
        before them were found again (0 if the source does not search)."""


class DraftTally:
    """Drafts that became output (accepted), and those that did not (rejected). By position: the first draft behind a
    drawn token is 1, and so on until one is refused or none is on its way."""

    def __init__(self) -> None:
        self.accepted = [0] * (len(DRAFT_POSITIONS) + 1)
        self.rejected = [0] * (len(DRAFT_POSITIONS) + 1)

    def accept(self, position: int) -> None:
        self.accepted[bisect_left(DRAFT_POSITIONS, position)] += 1

    def refuse(self, position: int, count: int) -> None:
        """Count `count` drafts from this position on as refused."""
        for at in range(position, position + count):
            self.rejected[bisect_left(DRAFT_POSITIONS, at)] += 1


class Foresight(msgspec.Struct):
    """What one request is expected to say next. Guesses that are not sent are judged, too, by the tokens that come:
    so it is known without any cost whether sending them would pay.

    expected: guesses for the tokens after the last known one, those on their way first. matched: see DraftSource,
    and right guesses since. drafted, accepted: tokens that were sent, and those of them that became output.
    """

    source: DraftSource
    acceptance: Acceptance
    tally: DraftTally
    expected: list[int] = msgspec.field(default_factory=list)
    matched: int = 0
    drafted: int = 0
    accepted: int = 0
    run: int = 0
    """Accepted drafts since one was refused, or none was on its way."""

    def look(self, sequence: RingSequence) -> float:
        """Guess how the sequence goes on behind its drafts, unless that is known; returns the share of guesses of this
        kind that are right."""
        if len(self.expected) <= len(sequence.ahead):
            found, matched = self.source.draft(sequence.tokens, sequence.ahead, FORESEEN)
            if not found:
                return 0.0
            if not self.expected:
                self.matched = matched
            self.expected = [*sequence.ahead, *found]
        return self.acceptance.share(kind_of(self.matched))

    def came(self, token_ids: Sequence[int], num_ahead: int) -> None:
        """Judge guesses by the tokens that came. num_ahead: how many of them were on their way."""
        for token_id in token_ids:
            if not self.expected:
                return
            if not num_ahead:
                self.run = 0
            is_right = self.expected[0] == token_id
            self.acceptance.note(kind_of(self.matched), is_right=is_right)
            if not is_right:
                self.expected.clear()
                self.tally.refuse(self.run + 1, num_ahead)
                self.run = 0
                return
            del self.expected[0]
            self.matched += self.matched > 0
            if num_ahead:
                num_ahead -= 1
                self.run += 1
                self.accepted += 1
                self.tally.accept(self.run)

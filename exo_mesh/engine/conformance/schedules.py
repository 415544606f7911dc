"""Random schedules of rows with drafts: what a driver sends, in frames of several sequences, and what it takes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from exo_mesh.domain.frame import LONGEST_DRAFT, Row
from exo_mesh.engine.contract import Capabilities

Forward = Callable[[Sequence[Row], Sequence[int]], np.ndarray]
"""Computes one frame; returns logits `[sum(num_logits), vocab]`."""

Check = Callable[[np.ndarray, np.ndarray], None]
"""Compares logits `[vocab]` with those of a sequence that never drafted."""

LONGEST_ROW = 6
RIGHT = 0.7
"""Probability of a draft to be right."""


@dataclass
class _Sent:
    row: Row
    ids: list[int]
    logits: np.ndarray


@dataclass
class DraftedSequence:
    """One sequence whose true tokens are known. tokens: prompt and output; want[i]: the logits at position
    `prompt + i`, as computed without drafts. rows[...]: on their way, not judged yet."""

    id: int
    tokens: Sequence[int]
    prompt: int
    want: np.ndarray
    rows: list[_Sent] = field(default_factory=list)
    judged: int = 0
    """Positions that are right for ever."""
    begin: int = 0
    """Where the next row begins, if none is on its way."""
    refusals: int = 0

    def __post_init__(self) -> None:
        self.judged = self.begin = self.prompt

    @property
    def is_done(self) -> bool:
        return self.judged >= len(self.tokens)

    def next_row(self, rng: Random, rollback: int, vocab_size: int) -> tuple[Row, list[int]] | None:
        """A row to send, and its token ids; None if too much is on its way, or nothing is left."""
        drafted = bool(self.rows)
        pos0 = self.rows[-1].row.pos0 + self.rows[-1].row.n if drafted else self.begin
        known = [] if drafted else list(self.tokens[pos0 : self.judged + 1])
        oldest = self.rows[0].row.pos0 if drafted else pos0
        most = min(len(self.tokens), oldest + rollback, pos0 + LONGEST_DRAFT) - pos0
        num_drafts = min(rng.randint(int(drafted), LONGEST_ROW), most - len(known))
        if num_drafts < drafted or most < len(known):
            return None
        ids, right = known, all(sent.ids == self._true(sent.row) for sent in self.rows)
        for position in range(pos0 + len(known), pos0 + len(known) + num_drafts):
            right = right and rng.random() < RIGHT
            ids = [*ids, self.tokens[position] if right else (self.tokens[position] + 1) % vocab_size]
        return Row(self.id, pos0, len(ids), num_logits=num_drafts + (not drafted), drafted=drafted), ids

    def judge(self, check: Check, *, at_rows: bool) -> None:
        """Compare the logits of the oldest row, and take back what is behind its first wrong draft."""
        sent = self.rows.pop(0)
        first = sent.row.pos0 + sent.row.n - sent.row.num_logits
        for index in range(sent.row.num_logits):
            position = first + index
            if sent.ids[position - sent.row.pos0] != self.tokens[position]:
                self._take_back(sent.row.pos0 if at_rows else position)
                self.refusals += 1
                return
            check(sent.logits[index], self.want[position - self.prompt])
            self.judged = position + 1
        self.begin = self.judged

    def repeat(self) -> None:
        """Send the rows on their way once more, as after a loss of frames."""
        if self.rows and self.rows[0].row.may_be_refused:
            self._take_back(self.rows[0].row.pos0)

    def _take_back(self, position: int) -> None:
        self.begin = position
        self.rows.clear()

    def _true(self, row: Row) -> list[int]:
        return list(self.tokens[row.pos0 : row.pos0 + row.n])


def run_drafts(
    sequences: Sequence[DraftedSequence],
    forward: Forward,
    check: Check,
    declared: Sequence[Capabilities],
    *,
    rng: Random,
    vocab_size: int,
) -> None:
    """Decode sequences that hold their prompts with drafts, chains of rows, refusals and repeats, and check the logits
    of every position. declared: of all stages."""
    rollback = min(one.rollback for one in declared)
    at_rows = any(one.cuts_at_rows for one in declared)
    while left := [sequence for sequence in sequences if not sequence.is_done]:
        made = [
            (sequence, made)
            for sequence in rng.sample(left, rng.randint(1, len(left)))
            if (made := sequence.next_row(rng, rollback, vocab_size))
        ]
        if made:
            rows = [row for _, (row, _) in made]
            logits = forward(rows, [token for _, (_, ids) in made for token in ids])
            ends = np.cumsum([row.num_logits for row in rows])
            for (sequence, (row, ids)), part in zip(made, np.split(logits, ends[:-1]), strict=True):
                sequence.rows.append(_Sent(row, ids, part))
        for sequence in left:
            if sequence.rows and (rng.random() < 0.5 or not made):
                sequence.judge(check, at_rows=at_rows)
            elif rng.random() < 0.05:
                sequence.repeat()


def without_drafts(
    sequences: Mapping[int, tuple[Sequence[int], int]], forward: Forward, chunk: int = LONGEST_DRAFT + 1
) -> dict[int, np.ndarray]:
    """The logits of each sequence from the end of its prompt on, decoded alone, token by token. sequences: {id: (true
    tokens, prompt)}, which hold nothing yet."""
    found: dict[int, np.ndarray] = {}
    for number, (tokens, prompt) in sequences.items():
        prefill({number: (tokens, prompt)}, forward, chunk)
        steps = [forward([Row(number, at, 1, 1)], tokens[at : at + 1]) for at in range(prompt, len(tokens))]
        found[number] = np.concatenate(steps)
    return found


def prefill(
    sequences: Mapping[int, tuple[Sequence[int], int]], forward: Forward, chunk: int = LONGEST_DRAFT + 1
) -> None:
    """Compute the prompts of sequences that hold nothing yet, in chunks."""
    for number, (tokens, prompt) in sequences.items():
        for pos0 in range(0, prompt, chunk):
            n = min(chunk, prompt - pos0)
            forward([Row(number, pos0, n, 1)], tokens[pos0 : pos0 + n])

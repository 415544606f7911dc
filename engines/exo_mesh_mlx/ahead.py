"""Guesses the next decode step, so that the device computes it while the driver samples, answers and asks for it.

mlx-lm's own loop samples on the device and begins the next step with the result. Here the driver samples. Therefore the
engine begins the next step with the likeliest tokens, and uses it only if the driver then asks for exactly these rows
and tokens. Otherwise the sequences are cut back and the step is computed as usual, so the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import msgspec
import numpy as np

from exo_mesh.domain.frame import Row

MIN_HITS = 2
"""Steps in a row that a guess must have been right about before a step is computed ahead."""

FORGIVEN_AFTER = 64
"""Right guesses in a row after which earlier wrong ones no longer count."""

LONGEST_PAUSE = 256
"""Most decode steps without a guess. A wrong guess costs up to a step, so each doubles the pause: text that is drawn at
a high temperature is hardly ever guessed."""


class GuessedStep(msgspec.Struct, frozen=True):
    """A step that is being computed: token_ids int32 `[rows]`, logits float32 `[rows, vocab]`."""

    rows: tuple[Row, ...]
    token_ids: mx.array
    logits: mx.array


class LookAhead:
    """Decides whether to compute a step ahead, and holds the step that is being computed. Starts without one."""

    def __init__(self, cut_back: Callable[[Row], None]) -> None:
        """cut_back: drops the positions of a row's sequence from the row on, if there is such a sequence."""
        self._cut_back = cut_back
        self._step: GuessedStep | None = None
        self._shown: tuple[tuple[Row, ...], np.ndarray] | None = None
        self._hits = self._wrong = self._pause = 0
        self.num_used = 0
        """The number of steps that had been computed ahead when they were asked for."""

    @property
    def is_due(self) -> bool:
        """Whether the step after the present one shall be computed ahead."""
        return self._hits >= MIN_HITS

    def begin(self, step: GuessedStep) -> None:
        """Remember a step that the device computes now."""
        self._step = step

    def showed(self, following: tuple[Row, ...], logits: np.ndarray) -> None:
        """Note the logits of a step after which none is computed ahead, and the rows that would follow it."""
        self._shown = following, logits

    def take(self, rows: tuple[Row, ...], token_ids: tuple[int, ...]) -> mx.array | None:
        """The logits of the step that was computed ahead, if it is exactly this one; otherwise undoes it."""
        step, shown, self._step, self._shown = self._step, self._shown, None, None
        if step is not None:
            follows = rows == step.rows
            is_right = follows and token_ids == tuple(np.array(step.token_ids).tolist())
            self._learn(follows=follows, is_right=is_right)
            if is_right:
                self.num_used += 1
                return step.logits
            self._undo(step)
        elif shown is not None and rows == shown[0]:
            if self._pause:
                self._pause -= 1
            else:
                self._learn(follows=True, is_right=_are_likeliest(token_ids, shown[1]))
        elif shown is not None:
            self._learn(follows=False, is_right=False)
        return None

    def drop(self) -> None:
        """Undo the step that is computed ahead, because the sequences are about to be used in another way."""
        step, self._step, self._shown = self._step, None, None
        if step is not None:
            self._undo(step)

    def _undo(self, step: GuessedStep) -> None:
        for row in step.rows:
            self._cut_back(row)

    def _learn(self, *, follows: bool, is_right: bool) -> None:
        """follows: the same sequences decode one more token. Other rows say nothing about the tokens."""
        self._hits = self._hits + 1 if is_right else 0
        if self._hits >= FORGIVEN_AFTER:
            self._wrong = 0
        if follows and not is_right:
            self._wrong += 1
            self._pause = min(1 << self._wrong, LONGEST_PAUSE)


def _are_likeliest(token_ids: Sequence[int], logits: np.ndarray) -> bool:
    return all(int(row.argmax()) == token for row, token in zip(logits, token_ids, strict=True))

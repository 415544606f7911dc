"""Compares the speed of a ring with and without drafts: a prediction may be wrong, for instance where stages share
cores. Pure."""

from __future__ import annotations

import math

import msgspec

PLAIN_TOKENS, DRAFT_TOKENS = 16, 64
"""Tokens of a window without drafts, and of one with them."""

TRY_OTHER = 8
"""After so many windows, the next one is of the other way; after more if that is slower by a factor."""

WEIGHT = 0.3
"""Of a new window: about three of them decide."""

MOST_KNOWN = 64
"""Numbers of running requests whose speeds are known."""


class WindowSpeeds(msgspec.Struct):
    """Tokens a second with one number of running requests: plain, and with drafts; 0.0: unknown."""

    plain: float = 0.0
    drafting: float = 0.0
    windows: int = 0

    def add(self, speed: float, *, drafted: bool) -> None:
        old = self.drafting if drafted else self.plain
        new = old + WEIGHT * (speed - old) if old else speed
        if drafted:
            self.drafting = new
        else:
            self.plain = new
        self.windows += 1

    @property
    def may_draft(self) -> bool:
        """Whether the next window may have drafts."""
        if not self.plain or not self.drafting:
            return not self.drafting
        ratio = self.drafting / self.plain
        period = math.ceil(TRY_OTHER * max(ratio, 1 / ratio))
        return (ratio >= 1) != (self.windows % period == 0)


class Worth:
    """Measures in windows of some tokens, in which the same number of requests runs and no prompt is computed."""

    def __init__(self) -> None:
        self._speeds: dict[int, WindowSpeeds] = {}
        self._rows = 0
        self._began = 0.0
        self._tokens = 0
        self._drafted = False
        self.may_draft = True

    def note(self, now: float, rows: int, tokens: int, *, drafted: bool) -> None:
        """Note a decode frame that came round: how many requests decode, and how many tokens it gave. drafted: it had
        drafts. now: seconds of any one clock."""
        if rows != self._rows:
            self.begin(now, rows)
            return
        self._tokens += tokens
        self._drafted = self._drafted or drafted
        if self._tokens < (DRAFT_TOKENS if self.may_draft else PLAIN_TOKENS) * rows or now <= self._began:
            return
        if self.may_draft or not self._drafted:  # else the first rows of the window had been drafted before it
            self._known(rows).add(self._tokens / (now - self._began), drafted=self._drafted)
        self.begin(now, rows)

    def begin(self, now: float, rows: int = 0) -> None:
        """Begin a window. rows: see `note`; 0: unknown, so that the next frame begins another one."""
        self._began, self._rows, self._tokens, self._drafted = now, rows, 0, False
        self.may_draft = rows not in self._speeds or self._speeds[rows].may_draft

    def _known(self, rows: int) -> WindowSpeeds:
        if rows not in self._speeds and len(self._speeds) >= MOST_KNOWN:
            self._speeds.clear()
        return self._speeds.setdefault(rows, WindowSpeeds())

"""Measures the speed of an instance by one request that runs there."""

from __future__ import annotations

from collections.abc import Callable

from exo_mesh.base.clock import Clock
from exo_mesh.domain.routing.speed import Speed

EVERY_TOKENS = 32
"""Most tokens of an answer between two samples of its steps. The first samples are taken at tokens 2, 4, 8, …, so that
a new instance is known soon; later ones are rare, because counting the requests at the instance takes microseconds."""


class LegTimes:
    """The times of one request on one instance, from the call to its driver on."""

    def __init__(
        self, speed: Speed, prompt_tokens: int, ahead: int, num_running: Callable[[], int], clock: Clock
    ) -> None:
        """prompt_tokens: that the instance computes for this request. ahead: prompt tokens of other requests that it
        computes before or beside them. num_running: how many requests run at the instance now."""
        self._speed = speed
        self._prompt_tokens = prompt_tokens
        self._ahead = ahead
        self._num_running = num_running
        self._clock = clock
        self._since = clock()
        self._num_tokens = 0
        self._num_sampled = 0
        self._due = 1
        self._was_copied = False

    def turn(self) -> None:
        """Note that the request has left the queue. The requests before it are done or share the time."""
        self._since = self._clock()
        self._ahead = 0

    def copied(self, num_tokens: int) -> None:
        """Note that the instance had so many tokens of the prompt already."""
        self._prompt_tokens = max(0, self._prompt_tokens - num_tokens)
        self._was_copied = True

    def came(self, num_tokens: int) -> None:
        """Note tokens, or pieces of text, that have just arrived. Called for each message of the driver."""
        self._num_tokens += num_tokens
        if self._num_tokens < self._due:
            return
        now = self._clock()
        if not self._num_sampled and self._was_copied and self._speed.is_known:
            pass  # a few tokens say little of the time of a whole prompt
        elif not self._num_sampled:
            self._speed.took_first(self._prompt_tokens + self._ahead, now - self._since, now)
        else:
            step_s = (now - self._since) / (self._num_tokens - self._num_sampled)
            self._speed.took_step(self._num_running(), step_s, now)
        self._since, self._num_sampled = now, self._num_tokens
        self._due = self._num_tokens + min(self._num_tokens, EVERY_TOKENS)

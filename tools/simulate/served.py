"""Simulated requests, and instances whose speed is a formula: `slots` requests at once, one prompt after the other, and
steps that take longer with more requests."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class SimRequest:
    """One request. prefill_s, tokens: what is left of it at its present instance."""

    entry: int
    arrived: float
    prompt: int
    output: int
    prefill_s: float = 0.0
    tokens: float = 0.0
    queued_at: float = 0.0
    turn_at: float = 0.0
    ahead: int = 0
    """Prompt tokens that its instance computes before its own."""
    first_at: float = 0.0
    moves: int = 0
    look_at: float = 0.0
    is_streaming: bool = False
    """Whether its first token at its present instance has come."""
    beside_idle_s: float = 0.0
    """How long it has waited while one and the same instance had nothing to do."""
    idle: str = ""
    """That instance."""

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.arrived


@dataclass(slots=True)
class SimInstance:
    """One instance of the model, on one peer."""

    name: str
    peer: int
    owner: int
    slots: int
    step_s: float
    slope_s: float
    prompt_token_s: float
    is_auto: bool = False
    is_up: bool = True
    is_draining: bool = False
    running: list[SimRequest] = field(default_factory=list)
    waiting: deque[SimRequest] = field(default_factory=deque)
    updated: float = 0.0
    version: int = 0
    placed_at: float = 0.0

    @property
    def outstanding(self) -> int:
        return len(self.running) + len(self.waiting)

    def outstanding_before(self, request: SimRequest) -> list[SimRequest]:
        """The requests ahead of one that waits."""
        return [*self.running, *itertools.takewhile(lambda one: one is not request, self.waiting)]

    def step_at(self, requests: int) -> float:
        return self.step_s + self.slope_s * min(requests, self.slots)

    def service_s(self, prompt: int, output: int) -> float:
        return prompt * self.prompt_token_s + output * self.step_at(1)

    def advance(self, now: float) -> None:
        """Let all requests make the progress of the time since the last call."""
        passed, self.updated = now - self.updated, now
        step_s = self.step_at(len(self.running))
        first = next((one for one in self.running if one.prefill_s > 0), None)
        for one in self.running:
            if one is first:
                one.prefill_s -= passed
            elif one.prefill_s <= 0:
                one.tokens -= passed / step_s

    def next_s(self) -> float:
        """Seconds until the next request has computed its prompt, or is done."""
        step_s = self.step_at(len(self.running))
        first = [one.prefill_s for one in self.running if one.prefill_s > 0][:1]
        times = [one.tokens * step_s for one in self.running if one.prefill_s <= 0]
        return max(0.0, min([*first, *times], default=float("inf")))

    def admit(self, now: float) -> None:
        while self.waiting and len(self.running) < self.slots:
            request = self.waiting.popleft()
            request.turn_at = now
            request.ahead = round(sum(max(0.0, one.prefill_s) for one in self.running) / self.prompt_token_s)
            request.prefill_s, request.tokens = request.prompt * self.prompt_token_s, float(request.output)
            self.running.append(request)

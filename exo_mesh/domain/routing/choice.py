"""Estimates when a request would be done at each instance of its model, and chooses one. Pure."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from exo_mesh.domain.routing.speed import Speed

NEAR = 0.1
"""Instances whose costs differ by less than this share count as equal: measurements are no more exact than that."""

NEAR_S = 0.005
"""Likewise in seconds, for short requests."""

FIRST_TOKEN_WEIGHT = 4.0
"""How much more a second before the first token costs than a second after it: until then the client sees nothing."""

PROMPT_TOKEN_S, STEP_S = 0.001, 0.05
"""Assumed times of an instance while no instance of the model has been measured. They are equal for all instances, so
requests are then spread evenly."""

MOVE_SHARE, MOVE_S = 0.2, 0.5
"""A request that waits in a queue moves to another instance only if that lowers its cost by this share, and by this
many seconds: measurements are not exact, and it loses its place."""

MOST_MOVES = 4
"""How often a request moves at most."""

RESIDUAL = 0.5
"""The part of a request that is left on average when another one arrives, of a request whose progress is unknown."""


class Job(NamedTuple):
    """The rest of a request: prompt tokens to compute, and the expected number of tokens to draw."""

    prompt_tokens: float
    output_tokens: float


class Option(msgspec.Struct, frozen=True):
    """An instance that could serve a request. own: the requests of this entry peer there, oldest first. others: number
    of requests of other entry peers there. slots: requests that it runs at once. rtt_s: round trip to its driver.
    trust: see Speed.trust. cached: tokens of the prompt that it has probably kept."""

    speed: Speed
    own: Sequence[Job] = ()
    others: int = 0
    slots: int = 1
    rtt_s: float = 0.0
    trust: float = 1.0
    cached: int = 0

    @property
    def num_requests(self) -> int:
        return len(self.own) + self.others


class Expected(msgspec.Struct, frozen=True):
    """Seconds from now until a request has its first token, and until it is done."""

    first_s: float
    total_s: float

    @property
    def cost(self) -> float:
        return self.total_s + FIRST_TOKEN_WEIGHT * self.first_s


class Pacing(msgspec.Struct, frozen=True):
    """Seconds per prompt token, and per token of one answer while some number of requests runs."""

    prompt_token_s: float
    step_s: float

    def service_s(self, job: Job) -> float:
        """Seconds that a request takes from its turn on."""
        return job.prompt_tokens * self.prompt_token_s + job.output_tokens * self.step_s


def expected_times(options: Sequence[Option], job: Job) -> list[Expected]:
    """The expected times of a request at each instance.

    An instance without measurements counts as fast as the fastest measured one now does (see Speed.trust), but with one
    slot: so it is tried, with one request at a time until its first token has come.
    """
    known = [option for option in options if option.speed.is_known]
    prompts = [one.trust * one.speed.prompt_token_s for one in known]
    steps = [one.trust * one.speed.step.at(1) for one in known if one.speed.step]
    prior = Pacing(min(prompts, default=PROMPT_TOKEN_S), min(steps, default=STEP_S))
    return [_expected(option, job, prior) for option in options]


def _expected(option: Option, job: Job, prior: Pacing) -> Expected:
    slots = max(1, option.slots) if option.speed.is_known else 1
    running = min(slots, option.num_requests + 1)
    pacing = _pacing(option, running, prior)
    wait_s = max(_slot_wait_s(option, slots, pacing, job), _prompts_ahead(option, slots, job) * pacing.prompt_token_s)
    prompt_s = max(0.0, job.prompt_tokens - option.cached) * pacing.prompt_token_s
    first_s = option.rtt_s + wait_s + prompt_s + pacing.step_s
    return Expected(first_s, first_s + max(0.0, job.output_tokens - 1) * pacing.step_s)


def _pacing(option: Option, running: int, prior: Pacing) -> Pacing:
    speed = option.speed
    if not speed.is_known:
        return prior
    step_s = option.trust * speed.step.at(running) if speed.step else prior.step_s
    return Pacing(option.trust * speed.prompt_token_s, step_s)


def _prompts_ahead(option: Option, slots: int, job: Job) -> float:
    """Prompt tokens that are computed before a new request's: an instance computes one prompt after the other. Of the
    requests of other entry peers only those in the queue count: how far the running ones are is unknown."""
    num_queued = min(option.others, max(0, option.num_requests - slots))
    return sum(one.prompt_tokens for one in option.own) + num_queued * job.prompt_tokens


def _slot_wait_s(option: Option, slots: int, pacing: Pacing, job: Job) -> float:
    """Seconds until a slot is free: each slot takes the next request in the order of arrival. The requests of other
    entry peers count as older than those of this one, and as long as `job`."""
    if option.num_requests < slots:
        return 0.0
    mean_s = pacing.service_s(job)
    services = [mean_s] * option.others + [pacing.service_s(one) for one in option.own]
    ends = [RESIDUAL * mean_s if index < option.others else seconds for index, seconds in enumerate(services[:slots])]
    heapq.heapify(ends)
    for seconds in services[slots:]:
        heapq.heapreplace(ends, ends[0] + seconds)
    return ends[0]


def choose(options: Sequence[Option], job: Job, rng: random.Random) -> int:
    """The index of the instance with the least expected cost. Among near-equal instances: the fewest requests, then the
    fewest own requests, then a random instance, so that several entry peers do not all choose the same one."""
    costs = [expected.cost for expected in expected_times(options, job)]
    most = min(costs) * (1 + NEAR) + NEAR_S
    near = [index for index, cost in enumerate(costs) if cost <= most]
    load = {index: (options[index].num_requests, len(options[index].own)) for index in near}
    least = min(load.values())
    return rng.choice([index for index in near if load[index] == least])


def better_than(options: Sequence[Option], current: int, job: Job) -> int | None:
    """The index of the instance that a request should move to while it waits in the queue of options[current]; None if
    it should stay. Of that instance only the requests ahead of it are given."""
    costs = [expected.cost for expected in expected_times(options, job)]
    best = min(range(len(options)), key=costs.__getitem__)
    gain = costs[current] - costs[best]
    return best if gain > MOVE_S and gain > MOVE_SHARE * costs[current] else None

"""Random trees of prompts on a ring with a prefix cache; between them cancels, evictions, faults and lost stages."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from exo_mesh.domain.plan import Ballot
from exo_mesh.engine.contract import StageEngine
from exo_mesh.rings.runner.driver import Driver
from exo_mesh.rings.runner.prefix.cache import PrefixCache
from exo_mesh.rings.runner.prefix.index import BLOCK_TOKENS
from exo_mesh.rings.runner.scheduling.limits import SchedulerLimits
from exo_mesh.rings.runner.stage import Stage
from tests.rings.runner.test_stage_and_driver import BALLOT, Caller, Ring, ids, request

MakeEngine = Callable[[int, int], StageEngine]
"""Makes the engine of a stage: (index, number of stages)."""


class CachingRing(Ring):
    """A ring whose driver has a prefix cache. cuts_back: whether its engines can cut KV back."""

    def __init__(
        self, num_stages: int, make: MakeEngine, *, cuts_back: bool = True, most_sequences: int = 0, **limits: float
    ) -> None:
        self.make = make
        self.engines = [make(index, num_stages) for index in range(num_stages)]  # type: ignore[misc]
        self.stages = [Stage(engine, index) for index, engine in enumerate(self.engines)]
        super().__init__(0)
        self.engines = [make(index, num_stages) for index in range(num_stages)]  # type: ignore[misc]
        self.stages = [Stage(engine, index) for index, engine in enumerate(self.engines)]
        self.limits = SchedulerLimits(num_stages, **limits)  # type: ignore[arg-type]
        self.cache = PrefixCache(num_stages, most_sequences, cuts_back=cuts_back)
        self.driver = Driver(BALLOT, self.limits, self.sent.append, prefix=self.cache)
        self.ballot = 1
        self.tampered: set[int] = set()
        """Kept sequences that some stage has lost without knowing it."""

    def submit(self, name: str, prompt: Sequence[int], tokens: int, **changes: object) -> Caller:
        caller = Caller()
        self.driver.submit(request(name, prompt, tokens, **changes), caller.mailbox)
        return caller

    def lose(self, lost: int) -> None:
        """Replace a stage by an empty one; the stages behind it keep what they hold, if they can cut KV back."""
        num_stages = len(self.stages)
        for stage in self.stages[: random.Random(lost).randrange(num_stages)]:
            for frame in self.sent:  # these stages have computed more than came round
                stage.process(frame)
        self.sent.clear()
        kept_from = lost + 1 if self.cache.cuts_back else num_stages
        for index in range(num_stages):
            if index == lost:
                self.engines[index] = self.make(index, num_stages)  # type: ignore[call-overload]
                self.stages[index] = Stage(self.engines[index], index)
            elif index < kept_from:
                self.stages[index].forget(list(self.engines[index].sequences()))
        self.ballot += 1
        self.driver.change(Ballot(self.ballot, "test"), self.limits, kept_from)

    def check(self) -> None:
        """At rest: every stage holds exactly what the cache keeps, and the cache keeps to its limits."""
        assert not self.sent and not self.driver._live and not self.driver.beginnings.shared._made
        cache = self.cache
        for index, engine in enumerate(self.engines):
            kept = {one for one in cache.held if index >= cache._first_of(cache._kept[one])}
            assert kept - self.tampered <= set(engine.sequences()) <= set(cache.held)
        assert cache.tokens == sum(cache._kept[one].length for one in cache.held)
        assert cache.num_kept == len(cache.held) == sum(map(len, cache._heads.values()))
        long = sum(one.length >= BLOCK_TOKENS for one in cache.kept())
        assert sum(map(len, cache._indexes.values())) == long
        assert cache.tokens <= self.limits.max_tokens


@dataclass
class Schedule:
    """One random schedule, from one seed. answer: what a request alone gets."""

    seed: int
    ring: CachingRing
    answer: Callable[[Sequence[int], int], list[int]]
    vocab: int
    longest: int = 260
    loses: bool = True
    callers: dict[str, tuple[list[int], int, Caller]] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.known: list[list[int]] = [self._tokens(self.rng.randrange(60, 150)) for _ in range(2)]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, self.vocab) for _ in range(count)]

    def _prompt(self) -> list[int]:
        """A known prompt or answer, maybe cut, with something new behind it."""
        base = self.rng.choice(self.known)
        kept = base[: self.rng.choice([len(base), len(base), self.rng.randrange(1, len(base) + 1)])]
        return (kept + self._tokens(self.rng.choice([0, 1, 5, 40])))[: self.longest] or [3]

    async def step(self) -> None:
        kind = self.rng.random()
        name = f"r{len(self.callers)}"
        if kind < 0.35:
            prompt, tokens = self._prompt(), self.rng.choice([1, 3, 9])
            self.callers[name] = prompt, tokens, self.ring.submit(name, prompt, tokens)
            self.known.append(prompt)
        elif kind < 0.42 and self.callers:
            chosen = self.rng.choice(list(self.callers))
            self.ring.driver.cancel(chosen, self.callers[chosen][2].mailbox)
            self.cancelled.add(chosen)
        elif kind < 0.46 and self.loses:
            self.ring.lose(self.rng.randrange(len(self.ring.stages)))
        elif kind < 0.50 and self.ring.cache.held:
            self._lose_one()
        elif kind < 0.53:
            self.ring.driver._scheduler.pressure = self.rng.choice([0, 1, 2])
        else:
            for _ in range(self.rng.randrange(12)):
                if self.ring.sent:
                    self.ring.lap()

    def _lose_one(self) -> None:
        """One stage loses one kept sequence, without knowing it."""
        engine = self.rng.choice(self.ring.engines)
        lost = self.rng.choice(self.ring.cache.held)
        engine.remove(lost)
        self.ring.tampered.add(lost)

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            await self.step()
        self.ring.driver._scheduler.pressure = 0
        self.ring.driver.pump()
        self.ring.run()
        for name, (prompt, tokens, caller) in self.callers.items():
            events = ids(await caller.collect())
            wanted = self.answer(prompt, tokens)
            if name in self.cancelled or caller.error == "memory_pressure":
                assert events == wanted[: len(events)], (self.seed, name)
            else:
                assert not caller.error, (self.seed, name, caller.messages[-1])
                assert events == wanted, (self.seed, name)

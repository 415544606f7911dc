"""Real engines with a prefix cache: in random schedules each request gets what it gets alone, with equal bits where the
engine promises them, and afterwards the stages hold what the cache keeps and nothing else."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from exo_mesh.engine.contract import StageEngine
from exo_mesh.rings.runner.drafting.sources import SourceMaker
from exo_mesh.rings.runner.prefix.cache import PrefixCache
from tests.engines.serving_ways import (
    DETERMINISTIC,
    DUMMY,
    FAST,
    LLAMACPP,
    MLX,
    MLX_IN_BLOCKS,
    TORCH,
    VOCAB,
    Bench,
    Way,
    write_model,
)
from tests.support.serving import Asked, ServingRing, Tokens

TOKENS = 5
CUTS: tuple[tuple[int, ...], ...] = ((), (2,), (1, 3))
EVEN_CUTS: tuple[tuple[int, ...], ...] = ((), (2,), (2, 6))
"""For architectures whose layers come in pairs."""
WAYS = (
    DUMMY,
    DETERMINISTIC,
    FAST,
    MLX,
    MLX_IN_BLOCKS,
    TORCH,
    LLAMACPP,
    replace(MLX, architecture="gemma3_text", dtype="float32"),
    replace(MLX, architecture="qwen3_next"),
    replace(MLX_IN_BLOCKS, architecture="qwen3_next"),
    replace(MLX, architecture="deepseek_v3", dtype="float32"),
    replace(TORCH, architecture="gemma3_text"),
    replace(TORCH, architecture="qwen3_next"),
    replace(MLX, architecture="llama4", dtype="float32"),
    replace(TORCH, architecture="llama4_text"),
    replace(TORCH, architecture="deepseek_v3"),
    replace(LLAMACPP, architecture="gemma3"),
    replace(LLAMACPP, architecture="mamba2"),
    replace(LLAMACPP, architecture="lfm2"),
)
"""Every engine, and every kind of KV that it has: full, windows, chunks, latent, recurrent."""
SEED = int(os.environ.get("EXO_MESH_TEST_SEED", "0"))
TODAY = SEED or int(time.time() // 86_400) * 10_000
"""The extended part has other schedules each day; a failure names the seed that repeats it."""

SHARES = 10
"""Into so many parts the thousands of schedules are divided, so that one takes a minute or two."""

Benches = Callable[[Way], Bench]


@pytest.fixture(scope="module")
def bench_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Benches]:
    made: dict[str, Bench] = {}

    def get(way: Way) -> Bench:
        if not way.is_installed:
            pytest.skip(f"the library of {way.engine} is not installed")
        if way.name not in made:
            made[way.name] = Bench(way, write_model(way, tmp_path_factory.mktemp(way.name)), (), TOKENS)
        return made[way.name]

    yield get
    for bench in made.values():
        bench.close()


@pytest.fixture(scope="module", autouse=True)
def short_parts() -> Iterator[None]:
    """NumPy, MLX and llama.cpp share short beginnings too, so that these prompts are not merely copied."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exo_mesh_numpy.kv.LEAST_SHARED", 16)
        if MLX.is_installed:
            patch.setattr("exo_mesh_mlx.shared.parts.LEAST_SHARED", 16)
            patch.setattr("exo_mesh_mlx.shared.alone.PATIENCE", 2)
        patch.setattr("exo_mesh_llamacpp.loading.LEAST_SHARED", 16)
        patch.setattr("exo_mesh_llamacpp.loading.FOREIGN_PER_WIDTH", 4)  # these models are narrow
        yield


class PromptTree:
    """Prompts that share beginnings: known ones, cut anywhere, with something new behind them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._known = [self._new(rng.randrange(70, 130)) for _ in range(2)]

    def _new(self, count: int) -> Tokens:
        return tuple(self._rng.randrange(3, VOCAB) for _ in range(count))

    def prompt(self) -> Tokens:
        base = self._rng.choice(self._known)
        size = self._rng.choice([len(base), len(base), self._rng.randrange(1, len(base) + 1)])
        made = (base[:size] + self._new(self._rng.choice([0, 0, 1, 7, 30])))[:170]
        self._known.append(made)
        return made

    def extend(self, answered: Tokens) -> None:
        self._known.append(answered)


class PrefixStory:
    """One random schedule on one ring."""

    make_source: SourceMaker | None = None
    """Where its requests draft from."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench, self.rng = bench, random.Random(seed)
        engines = bench.stages(self.rng.choice(EVEN_CUTS if bench.way.architecture == "lfm2" else CUTS))
        self.cache = PrefixCache(len(engines), self.rng.choice([0, 0, 5]), cuts_back=_cut_back(engines))
        limits = {
            "prefill_chunk": self.rng.choice([16, 64, 100]),
            "max_tokens": self.rng.choice([300, 600, 5000]),
            "max_running": self.rng.choice([8, 3]),
        }
        self.before = [engine.memory_bytes() for engine in engines]
        times = [1e-4] * len(engines)
        self.ring = ServingRing(engines, computing_s=times, prefix=self.cache, make_source=self.make_source, **limits)
        self.tree, self.cancelled, self.happened = PromptTree(self.rng), set[str](), Counter[str]()

    def act(self) -> None:
        kind = self.rng.random()
        if kind < 0.3:
            self._ask()
        elif kind < 0.36 and self.ring.asked:
            asked = self.rng.choice(list(self.ring.asked.values()))
            if not asked.answers.ended:
                self.cancelled.add(asked.request.request_id)
            self.ring.cancel(asked)
        elif kind < 0.40:
            self.happened["lost"] += 1
            self.ring.lose(self.rng.randrange(len(self.ring.engines)))
        elif kind < 0.43 and self.cache.held:
            self.happened["forgotten"] += 1
            self.rng.choice(self.ring.engines).remove(self.rng.choice(self.cache.held))
        elif kind < 0.46:
            self.ring.pressure = self.rng.choice([0, 1, 2])
        else:
            for _ in range(self.rng.randrange(16)):
                self.ring.step(self.rng.randrange(len(self.ring.engines)))
        for asked in self.ring.asked.values():
            self.ring.read(asked)
            if asked.answers.ended and not asked.answers.error:
                self.tree.extend((*asked.request.prompt_ids, *asked.answers.tokens))

    def _ask(self) -> None:
        """One request, or two choices of one, maybe with rules of its own for the cache."""
        prompt, is_kept = self.tree.prompt(), self.rng.random() > 0.1
        scope = self.rng.choice([b"", b"", b"", b"", b"", b"a session"])
        self.happened["with rules"] += not is_kept or bool(scope)
        fields = {"is_kept": is_kept, "cache_scope": scope}
        if self.rng.random() < 0.1:
            self.happened["choices"] += 1
            fields["share_id"] = f"c{len(self.ring.asked)}"
            self.ring.submit(prompt, self.rng.choice([1, 3, TOKENS]), **fields)
        self.ring.submit(prompt, self.rng.choice([1, 3, TOKENS]), **fields)

    def run(self, steps: int) -> Counter[str]:
        for _ in range(steps):
            self.act()
        self.ring.pressure = 0
        self.ring.run()
        assert all(set(engine.sequences()) <= set(self.cache.held) for engine in self.ring.engines)
        self.happened += Counter({"hit": self.cache.hits, "evicted": self.cache.evictions})
        self.happened["evicted while running"] += self.ring.driver.evictions
        self.cache._drop_all()
        self.ring.driver.pump()
        self.ring.run()
        assert not any(engine.sequences() for engine in self.ring.engines)
        for asked in self.ring.asked.values():
            self._check(asked)
        return self.happened

    def _check(self, asked: Asked) -> None:
        name = asked.request.request_id
        if name in self.cancelled or asked.answers.error == "memory_pressure":
            asked.answers.messages = [one for one in asked.answers.messages if not one.error_code]
        else:
            assert not asked.answers.error, (name, asked.answers.messages[-1])
            assert len(asked.answers.tokens) == asked.request.max_tokens
        self.bench.check(asked)


def _cut_back(engines: list[StageEngine]) -> bool:
    return all(engine.capabilities.cuts_anywhere for engine in engines)


FAST_ENGINES = ("dummy", "numpy", "llamacpp")
LIBRARY_COST = 5
"""A schedule takes about so many times longer with MLX, torch or a model with windows than with NumPy."""


def run_stories(bench: Bench, first: int, count: int, kind: type[PrefixStory] = PrefixStory) -> Counter[str]:
    happened = Counter[str]()
    for seed in range(first, first + count):
        try:
            happened += kind(bench, seed).run(40)
        except BaseException as exc:
            exc.add_note(f"{bench.way.name}: EXO_MESH_TEST_SEED={seed} repeats this schedule as the first one")
            raise
    print(f"{bench.way.name}: {count} schedules from {first} on: {dict(happened)}")
    return happened


HAPPENINGS = ("evicted", "lost", "forgotten", "with rules", "choices")


def check_happenings(happened: Counter[str], count: int) -> None:
    """So many schedules had all that may go wrong in them; a few may have none of it."""
    if count >= 10:
        assert happened["hit"] >= count // 2
        assert all(happened[one] > count // 20 for one in HAPPENINGS)


def stories(way: Way, count: int) -> int:
    slower = 1 if way.engine in FAST_ENGINES and way.architecture != "gemma3" else LIBRARY_COST
    return max(2, count // (slower * (5 if way.architecture == "qwen3_next" else 1)))


@pytest.mark.parametrize("way", [DUMMY, DETERMINISTIC, FAST, LLAMACPP], ids=lambda way: way.name)
def test_each_request_gets_what_it_gets_alone(way: Way, bench_of: Benches) -> None:
    assert run_stories(bench_of(way), SEED, 12 if way == DUMMY else 3)["hit"] > 2


def test_a_sequence_that_waited_after_a_lost_stage_and_was_cancelled_is_removed(bench_of: Benches) -> None:
    """Stages kept such a sequence for ever in this schedule: it had to wait for a prompt that another one computed, and
    lost its place before that."""
    run_stories(bench_of(DUMMY), 31249, 1)


@pytest.mark.extended
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_each_request_gets_what_it_gets_alone_in_many_schedules(way: Way, bench_of: Benches) -> None:
    check_happenings(run_stories(bench_of(way), TODAY, stories(way, 20)), stories(way, 20))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(SHARES))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_each_request_gets_what_it_gets_alone_in_thousands_of_schedules(way: Way, part: int, bench_of: Benches) -> None:
    """EXO_MESH_TEST_SCHEDULES: of all parts, for an engine whose steps are quick; the others have a fifth of them."""
    count = stories(way, int(os.environ.get("EXO_MESH_TEST_SCHEDULES", "2000")) // SHARES)
    check_happenings(run_stories(bench_of(way), (SEED or 1000) + 10_000 * part, count), count)


class Agent:
    """An agent with one conversation on a ring of two stages, and how many tokens the ring computes for it."""

    def __init__(self, bench: Bench) -> None:
        engines = bench.stages((2,))
        self.cache = PrefixCache(2, cuts_back=_cut_back(engines))
        self.ring = ServingRing(engines, computing_s=[1e-4] * 2, prefix=self.cache)
        self._seen = 0

    def ask(self, prompt: Tokens, tokens: int = TOKENS) -> list[int]:
        asked = self.ring.submit(prompt, tokens)
        while self.ring.num_in_flight:
            self.ring.run()
            self.ring.read(asked)
        assert not asked.answers.error and len(asked.answers.tokens) == tokens
        return asked.answers.tokens

    def computed(self) -> int:
        """Tokens that went round since the last call."""
        frames, self._seen = self.ring.frames[self._seen :], len(self.ring.frames)
        return sum(len(frame.token_ids) for frame in frames)

    def close(self) -> None:
        self.cache._drop_all()
        self.ring.driver.pump()
        self.ring.run()


def check_a_trace(bench: Bench) -> None:
    """Twenty steps of an agent: each prompt is the last one, its answer and what a tool said. Then the last prompt
    again."""
    rng, agent = random.Random(7), Agent(bench)
    talk: Tokens = tuple(rng.randrange(3, VOCAB) for _ in range(150))
    new = len(talk)
    for _ in range(20):
        answer = agent.ask(talk)
        said = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(15, 60))]
        talk = (*talk, *answer, *said)
        new += len(answer) + len(said)
    assert agent.computed() <= 1.1 * new
    agent.ask(talk)
    agent.computed()
    agent.ask(talk)
    assert agent.computed() <= 64 + TOKENS, "at most one block again"
    agent.close()


@pytest.mark.parametrize("way", [DUMMY, LLAMACPP], ids=lambda way: way.name)
def test_an_agent_computes_only_what_is_new(way: Way, bench_of: Benches) -> None:
    check_a_trace(bench_of(way))


@pytest.mark.extended
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_an_agent_computes_only_what_is_new_with_every_kind_of_kv(way: Way, bench_of: Benches) -> None:
    check_a_trace(bench_of(way))

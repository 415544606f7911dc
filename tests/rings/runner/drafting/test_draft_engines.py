"""Real engines that draft by chance: in random schedules with a prefix cache, evictions, copies, cancelled requests and
lost stages, each request gets what it gets alone, with equal bits where the engine promises them."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from exo_mesh.domain.request import GenerateRequest
from exo_mesh.rings.runner.drafting.worth import Worth
from exo_mesh.rings.runner.scheduling.pace import Pace
from tests.engines.serving_ways import DETERMINISTIC, DUMMY, LLAMACPP, MLX, TORCH, Bench, Way, write_model
from tests.rings.runner.prefix.test_prefix_engines import SEED, SHARES, WAYS, PrefixStory, run_stories, stories
from tests.support.drafting import Oracle

TOKENS = 12


@pytest.fixture(scope="module")
def bench_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, DraftBench]]:
    made: dict[str, DraftBench] = {}
    yield made
    for bench in made.values():
        bench.close()


@pytest.fixture(autouse=True)
def drafts_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)

    def drafts(pace: Pace, rows: int, share: float) -> tuple[int, int]:
        return chance.choice([1, 2, 3, 5]), chance.choice([1, 2, 4])

    monkeypatch.setattr(Pace, "drafts", drafts)
    monkeypatch.setattr(Worth, "note", lambda *_args, **_named: None)


class DraftBench(Bench):
    """oracle: the same model with engines of its own, which compute while those of the ring hold sequences."""

    def __init__(self, way: Way, model_dir: Path) -> None:
        super().__init__(way, model_dir, (), TOKENS)
        self.oracle = Bench(way, model_dir, (), TOKENS)

    def close(self) -> None:
        self.oracle.close()
        super().close()


class DraftStory(PrefixStory):
    """Its requests draft what they say alone, right as often as chance has it."""

    def __init__(self, bench: DraftBench, seed: int) -> None:
        chance = random.Random(seed)
        right = chance.choice([0.3, 0.7, 0.95])

        def make_source(request: GenerateRequest) -> Oracle:
            alone = bench.oracle.alone(request.prompt_ids)
            return Oracle([*request.prompt_ids, *alone.answers.tokens], right, chance)

        self.make_source = make_source
        super().__init__(bench, seed)

    def run(self, steps: int) -> Counter[str]:
        happened = super().run(steps)
        tally = self.ring.driver.drafts.tally
        happened += Counter({"accepted": sum(tally.accepted), "rejected": sum(tally.rejected)})
        return happened


def check(way: Way, first: int, count: int, benches: dict[str, DraftBench], tmp: pytest.TempPathFactory) -> None:
    if not way.is_installed:
        pytest.skip(f"the library of {way.engine} is not installed")
    if way.name not in benches:
        benches[way.name] = DraftBench(way, write_model(way, tmp.mktemp(way.name)))
    happened = run_stories(benches[way.name], first, count, DraftStory)
    assert happened["accepted"] and happened["accepted"] + happened["rejected"] > 2 * count


@pytest.mark.parametrize("way", [DUMMY, DETERMINISTIC], ids=lambda way: way.name)
def test_each_request_gets_what_it_gets_alone(
    way: Way, bench_of: dict[str, DraftBench], tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(way, SEED, 6 if way == DUMMY else 2, bench_of, tmp_path_factory)


@pytest.mark.extended
@pytest.mark.parametrize("way", [way for way in WAYS if way not in (DUMMY, DETERMINISTIC)], ids=lambda way: way.name)
def test_each_request_gets_what_it_gets_alone_with_every_engine_and_kind_of_kv(
    way: Way, bench_of: dict[str, DraftBench], tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(way, SEED, stories(way, 15), bench_of, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(SHARES))
@pytest.mark.parametrize("way", [DUMMY, DETERMINISTIC, MLX, TORCH, LLAMACPP], ids=lambda way: way.name)
def test_each_request_gets_what_it_gets_alone_in_hundreds_of_schedules(
    way: Way, part: int, bench_of: dict[str, DraftBench], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """EXO_MESH_TEST_SCHEDULES: of all parts, for the first two engines; the others have a fifth of them."""
    wanted = int(os.environ.get("EXO_MESH_TEST_SCHEDULES", "1000"))
    count = wanted // (SHARES if way in (DUMMY, DETERMINISTIC) else 5 * SHARES)
    check(way, (SEED or 1000) + 10_000 * part, count, bench_of, tmp_path_factory)

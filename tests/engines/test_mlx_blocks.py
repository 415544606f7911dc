"""Rows of similar length attend in one call, from one array per layer: each gets what it gets alone, within a margin,
whoever joins, leaves or is cut back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx
from exo_mesh_mlx import provider
from exo_mesh_mlx.arranging import PATIENCE, BlockKeeper, is_similar
from exo_mesh_mlx.caches import CacheLayout, SequenceCache
from exo_mesh_mlx.engine import MlxStage
from exo_mesh_mlx.options import MlxOptions, parse_options
from exo_mesh_mlx.shared.blocks import KvBlock
from exo_mesh_mlx.shared.parts import STEP
from mlx_lm.models import cache as mlx_caches

from exo_mesh.domain.frame import Row
from exo_mesh.errors import InputError
from tests.support.exactness import EPSILON, rms
from tools.architectures.mlx_configs import tiny_config
from tools.architectures.mlx_models import write_checkpoint
from tools.architectures.sizes import LAYERS, VOCAB
from tools.stages import Stages, forward, insert

CONTEXT = 2048
ALONE = 99

IN_BLOCKS = {
    "qwen3": "keys and values only",
    "gemma3_text": "windows that wrap go row by row beside them",
    "qwen3_next": "recurrent states do",
    "gpt2": "model code computes with an array of offsets",
    "gemma4": "and here, where layers use the keys and values of others, too",
}
NOT_IN_BLOCKS = {
    "deepseek_v3": "model code computes with its latents",
    "mamba2": "there are no keys and values",
    "llama4": "rows do not share a forward at all",
}


@dataclass
class Company:
    """Sequences on the whole model, whose tokens are drawn from a seed."""

    engine: MlxStage
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    tokens: dict[int, list[int]] = field(default_factory=dict)
    worst: float = 0.0

    def join(self, sequence: int, length: int) -> None:
        self.tokens[sequence] = [self.rng.randrange(VOCAB) for _ in range(length)]
        insert([self.engine], [sequence], CONTEXT)
        forward([self.engine], [Row(sequence, 0, length)], self.tokens[sequence])

    def leave(self, sequence: int) -> None:
        self.engine.remove(sequence)
        del self.tokens[sequence]

    def step(self, *sequences: int, n: int = 1) -> None:
        """One frame with n new tokens of each sequence; its logits are compared with those of each one alone."""
        for one in sequences:
            self.tokens[one] += [self.rng.randrange(VOCAB) for _ in range(n)]
        rows = [Row(one, len(self.tokens[one]) - n, n, n) for one in sequences]
        got = forward([self.engine], rows, [token for one in sequences for token in self.tokens[one][-n:]])
        for place, one in enumerate(sequences):
            self.compare(one, got[place * n : (place + 1) * n])

    def compare(self, sequence: int, got: np.ndarray) -> None:
        tokens = self.tokens[sequence]
        insert([self.engine], [ALONE], CONTEXT)
        want = forward([self.engine], [Row(ALONE, 0, len(tokens), len(got))], tokens)
        self.engine.remove(ALONE)
        self.worst = max(self.worst, float(np.abs(got - want).max()) / rms(want))
        assert self.worst <= EPSILON["float32"]

    def cut_back(self, sequence: int, count: int) -> None:
        """The next step begins `count` positions earlier."""
        del self.tokens[sequence][-count:]

    def block_of(self, sequence: int) -> KvBlock | None:
        return self.engine._sequences[sequence].cache.block

    def mates(self, sequence: int) -> set[int]:
        """The sequences in its block."""
        block = self.block_of(sequence)
        return {one for one in self.tokens if block is not None and self.block_of(one) is block}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    stages = Stages(provider, write_checkpoint(tmp_path_factory.mktemp("qwen3"), tiny_config("qwen3")), LAYERS)
    yield stages
    stages.close()


@pytest.fixture
def company(qwen3: Stages) -> Iterator[Company]:
    (engine,) = qwen3.ring(())
    assert isinstance(engine, MlxStage)
    yield Company(engine)
    for sequence in list(engine.sequences()):
        engine.remove(sequence)


@pytest.mark.parametrize(
    "architecture", [pytest.param(one, marks=() if one == "gemma3_text" else pytest.mark.extended) for one in IN_BLOCKS]
)
def test_rows_in_a_block_get_what_they_get_alone(tmp_path: Path, architecture: str) -> None:
    stages = Stages(provider, write_checkpoint(tmp_path, tiny_config(architecture)), LAYERS)
    (engine,) = stages.ring(())
    assert isinstance(engine, MlxStage)
    company = Company(engine)
    for sequence, length in enumerate((12, 43, 20), 1):
        company.join(sequence, length)
    for frame in ((1, 2, 3), (3, 1, 2), (2, 3), (1, 3, 2)):
        company.step(*frame)
    assert company.mates(1) == {1, 2, 3}
    company.step(1, 2, 3, n=3)
    stages.close()


@pytest.mark.parametrize("architecture", [pytest.param(one, marks=pytest.mark.extended) for one in NOT_IN_BLOCKS])
def test_a_model_that_does_not_allow_blocks_has_none(tmp_path: Path, architecture: str) -> None:
    stages = Stages(provider, write_checkpoint(tmp_path, tiny_config(architecture)), LAYERS)
    (engine,) = stages.ring(())
    assert isinstance(engine, MlxStage) and not engine.keeper.is_on
    stages.close()


def test_all_rows_attend_in_one_call(company: Company, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    attend = mx.fast.scaled_dot_product_attention

    def counted(queries: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append(queries.shape[0])
        return attend(queries, *args, **kwargs)

    for sequence in (1, 2, 3, 4):
        company.join(sequence, 10 * sequence)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", counted)
    rows = [Row(one, 10 * one, 1, 1) for one in (1, 2, 3, 4)]
    forward([company.engine], rows, [5] * 4)
    assert batches == [4] * LAYERS


def test_random_company_leaves_each_row_as_it_is_alone(company: Company) -> None:
    """Rows of any length come, go, miss frames, are cut back, copied and saved, beyond the positions of a block."""
    rng, last, shared = company.rng, 0, 0
    for _ in range(18):
        act = rng.choice(("join", "leave", "step", "step", "step", "draft", "copy", "move", "restore"))
        present = sorted(company.tokens)
        if act == "join" or len(present) < 2:
            last += 1
            company.join(last, rng.choice((9, 30, STEP - 3, STEP - 1, 2 * STEP + 5)))
        elif act == "leave":
            company.leave(rng.choice(present))
        elif act == "draft":
            some = rng.sample(present, rng.randint(2, len(present)))
            company.step(*some, n=3)
            company.cut_back(rng.choice(some), 2)
        elif act == "copy":
            source, last = rng.choice(present), last + 1
            company.engine.copy(source, last, len(company.tokens[source]) - 1, CONTEXT)
            company.tokens[last] = company.tokens[source][:-1]
        elif act == "move":
            source, last = rng.choice(present), last + 1
            company.engine.move(source, last, len(company.tokens[source]) - 1, CONTEXT)
            company.tokens[last] = company.tokens.pop(source)[:-1]
        elif act == "restore":
            source, last = rng.choice(present), last + 1
            company.engine.restore(last, CONTEXT, company.engine.save(source))
            company.tokens[last] = list(company.tokens[source])
        else:
            rng.shuffle(present)
            company.step(*present[: rng.randint(1, len(present))])
        shared += sum(len(company.mates(one)) > 1 for one in company.tokens)
    assert shared > 18, "most of the time, rows share a block"


def test_a_row_that_leaves_moves_no_more_than_the_last_one(company: Company) -> None:
    for sequence in (1, 2, 3, 4):
        company.join(sequence, 20 + sequence)
    company.step(1, 2, 3, 4)
    block = company.block_of(1)
    assert block is not None
    places = [id(cache) for cache in block.rows]
    company.leave(2)
    assert [id(cache) for cache in block.rows] == [places[0], places[3], places[2]]
    company.step(4, 1, 3)
    company.join(5, 22)
    company.step(4, 5, 1, 3)
    assert company.mates(5) == {1, 3, 4, 5}


def test_rows_of_very_different_length_share_no_block(company: Company) -> None:
    for sequence, length in enumerate((20, 40, 700, 800), 1):
        company.join(sequence, length)
    company.step(1, 2, 3, 4)
    assert (company.mates(1), company.mates(3)) == ({1, 2}, {3, 4})


def test_padding_takes_at_most_a_fifth_of_a_long_block() -> None:
    longest, shortest = 10_000, next(length for length in range(10_000) if is_similar(length, 10_000))
    assert shortest >= 0.8 * longest
    assert is_similar(1, 1 + STEP) and not is_similar(1, 2 + STEP)


def test_a_sequence_that_stays_away_gives_its_place_back(company: Company) -> None:
    for sequence in (1, 2, 3):
        company.join(sequence, 30)
    company.step(1, 2, 3)
    for _ in range(PATIENCE):
        company.step(1, 2)
    assert company.mates(1) == {1, 2, 3}
    company.step(1, 2)
    assert company.mates(1) == {1, 2}
    company.step(1, 2, 3)
    assert company.mates(1) == {1, 2, 3}


@pytest.mark.extended
def test_a_step_writes_in_place_and_changes_of_company_copy_a_layer_at_a_time(company: Company) -> None:
    """In bytes over those before: of a step, at most a tenth of the block; else a third."""
    for sequence in (1, 2, 3, 4):
        company.join(sequence, 1300 + sequence)

    def peak(*frame: int) -> int:
        for one in frame:
            company.tokens[one].append(5)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        forward([company.engine], [Row(one, len(company.tokens[one]) - 1, 1, 1) for one in frame], [5] * len(frame))
        return max(0, mx.get_peak_memory() - max(before, mx.get_active_memory()))

    joining = peak(1, 2, 3, 4)
    block = company.block_of(1)
    assert block is not None
    size = block.num_bytes
    steps = [peak(1, 2, 3, 4), peak(4, 2, 1, 3), *(peak(1, 3) for _ in range(PATIENCE))]
    leaving = peak(1, 3)
    assert len(block.rows) == 2 and block.num_bytes == size // 2
    assert max(steps) < size / 10
    assert max(joining, leaving) < size / 3


def test_a_sequence_that_is_only_kept_leaves_its_block(company: Company) -> None:
    for sequence in (1, 2, 3):
        company.join(sequence, 30)
    company.step(1, 2, 3)
    company.engine.keep(2)
    assert company.mates(1) == {1, 3}
    company.engine.copy(2, 4, 29, CONTEXT)
    company.tokens[4] = company.tokens[2][:29]
    company.step(1, 3, 4)
    assert company.mates(4) == {1, 3, 4} and company.block_of(2) is None


def test_a_lone_row_is_in_no_block(company: Company) -> None:
    for sequence in (1, 2):
        company.join(sequence, 30)
    company.step(1, 2)
    company.leave(2)
    company.step(1)
    assert company.block_of(1) is None


def test_what_a_broken_row_leaves_behind_does_not_reach_the_next_one_in_its_place() -> None:
    """Attention multiplies positions behind the end of a row by zero, and zero times infinity is not a number."""
    caches = [_cache(length) for length in (20, 30, 25)]
    block = KvBlock(caches[0].shareable())
    block.add(caches)
    for array in block.arrays():
        array[1] = mx.array(float("inf"))
    block.drop(caches[1])
    block.add([_cache(10)])
    assert len(block.rows) == 3
    assert all(mx.isfinite(array).all().item() for array in block.arrays())


def test_a_block_that_loses_rows_gives_their_memory_back() -> None:
    caches = [_cache(20) for _ in range(8)]
    block = KvBlock(caches[0].shareable())
    block.add(caches)
    place = block.num_bytes // 8
    sizes = []
    for cache in caches:
        block.drop(cache)
        sizes.append(block.num_bytes // place)
    assert sizes == [8, 6, 6, 4, 4, 2, 2, 0]


def test_keys_that_leave_a_block_are_those_that_came() -> None:
    caches = [_cache(20, seed) for seed in range(3)]
    keys = [np.array(cache.entries[0].keys[:, :, :20]) for cache in caches]
    block = KvBlock(caches[0].shareable())
    block.add(caches)
    assert caches[1].entries[0].keys is None
    for cache, its_keys in zip(caches, keys, strict=True):
        cache.settle()
        np.testing.assert_array_equal(np.array(cache.entries[0].keys[:, :, :20]), its_keys)


def test_a_keeper_that_is_off_leaves_sequences_alone() -> None:
    caches = [_cache(20), _cache(20)]
    assert BlockKeeper().arrange(caches) == [0, 1]
    assert all(cache.block is None for cache in caches)


def _cache(length: int, seed: int = 0) -> SequenceCache:
    entry = mlx_caches.KVCache()
    new = mx.random.normal((1, 2, length, 4), key=mx.random.key(seed))
    entry.update_and_fetch(new, new)
    cache = SequenceCache([entry], CacheLayout((0,), ()))
    cache.length = length
    return cache


def test_the_option_switches_blocks_off() -> None:
    assert parse_options({}) == MlxOptions(batch_attention=True)
    assert parse_options({"batch_attention": "off"}) == MlxOptions(batch_attention=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"batch_attention": "maybe"}, "may be on or off"), ({"speed": "high"}, "it has batch_attention")],
)
def test_other_options_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        parse_options(options)


def test_without_blocks_no_sequence_is_ever_in_one(tmp_path: Path) -> None:
    model_dir = write_checkpoint(tmp_path, tiny_config("qwen3"))
    stages = Stages(provider, model_dir, LAYERS, batch_attention="off")
    (engine,) = stages.ring(())
    assert isinstance(engine, MlxStage) and engine.batched and not engine.keeper.is_on
    stages.close()

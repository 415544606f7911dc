"""A decode step that was computed ahead gives the bits of one that was not, and a wrong guess leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

pytest.importorskip("mlx_lm")

from exo_mesh_mlx import provider
from exo_mesh_mlx.ahead import LONGEST_PAUSE, MIN_HITS, LookAhead
from exo_mesh_mlx.engine import MlxStage

from exo_mesh.domain.frame import Row
from tools.architectures.mlx_configs import tiny_config
from tools.architectures.mlx_models import write_checkpoint
from tools.architectures.sizes import LAYERS
from tools.stages import Stages, forward, insert

PROMPT = tuple(range(3, 15))
LAST_POSITION = 64


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    model_dir = write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen3"))
    stages = Stages(provider, model_dir, LAYERS, batch_attention="off")  # so that a row has the same bits in company
    yield stages
    stages.close()


class Decoding:
    """Sequences on the whole model, which decode the likeliest tokens unless others are given."""

    def __init__(self, stages: Stages, *sequences: int) -> None:
        (self.engine,) = stages.ring(())
        assert isinstance(self.engine, MlxStage)
        for sequence in self.engine.sequences():
            self.engine.remove(sequence)
        self.engine.ahead = self.ahead = LookAhead(self.engine._drop_guess)
        insert([self.engine], sequences, LAST_POSITION)
        self.tokens = {sequence: [*PROMPT, sequence] for sequence in sequences}
        for sequence in sequences:
            forward([self.engine], [Row(sequence, 0, len(PROMPT))], PROMPT)

    def step(self, *sequences: int) -> np.ndarray:
        """Logits of the last token of each sequence; the likeliest token of each follows."""
        rows = [Row(one, len(self.tokens[one]) - 1, 1, 1) for one in sequences]
        logits = forward([self.engine], rows, [self.tokens[one][-1] for one in sequences])
        for one, likeliest in zip(sequences, logits.argmax(axis=1), strict=True):
            self.tokens[one].append(int(likeliest))
        return logits

    def again(self, sequence: int, logits: np.ndarray) -> None:
        """Checks the last logits of a sequence against those of its tokens in one go."""
        tokens = self.tokens[sequence][:-1]
        insert([self.engine], [99], LAST_POSITION)
        forward([self.engine], [Row(99, 0, len(tokens) - 1)], tokens[:-1])
        alone = forward([self.engine], [Row(99, len(tokens) - 1, 1, 1)], tokens[-1:])
        self.engine.remove(99)
        assert np.array_equal(logits, alone[0])


def test_after_some_right_guesses_each_step_was_computed_ahead(stages: Stages) -> None:
    decoding = Decoding(stages, 1)
    for _ in range(MIN_HITS + 6):
        logits = decoding.step(1)
    assert decoding.ahead.num_used == 5
    decoding.again(1, logits[0])


def test_several_rows_are_never_computed_ahead(stages: Stages) -> None:
    decoding = Decoding(stages, 1, 2)
    for _ in range(MIN_HITS + 6):
        logits = decoding.step(1, 2)
    assert decoding.ahead.num_used == 0
    decoding.again(1, logits[0])
    decoding.again(2, logits[1])


@pytest.mark.parametrize("company", [(2,), (2, 1), (1, 2, 3)])
def test_other_rows_than_guessed_get_their_own_bits(stages: Stages, company: Sequence[int]) -> None:
    decoding = Decoding(stages, 1, 2, 3)
    for _ in range(MIN_HITS + 2):
        decoding.step(1)
    logits = decoding.step(*company)
    for sequence, its in zip(company, logits, strict=True):
        decoding.again(sequence, its)


def test_a_token_that_was_not_the_likeliest_gets_its_own_bits(stages: Stages) -> None:
    decoding = Decoding(stages, 1)
    for _ in range(MIN_HITS + 2):
        decoding.step(1)
    decoding.tokens[1][-1] = 5 if decoding.tokens[1][-1] != 5 else 6
    decoding.again(1, decoding.step(1)[0])


def test_a_sequence_is_copied_and_saved_without_the_guess(stages: Stages) -> None:
    decoding = Decoding(stages, 1)
    for _ in range(MIN_HITS + 2):
        decoding.step(1)
    assert decoding.engine.save(1).length == len(decoding.tokens[1]) - 1
    for _ in range(MIN_HITS):
        decoding.step(1)
    length = len(decoding.tokens[1]) - 1
    decoding.engine.copy(1, 7, length, LAST_POSITION)
    decoding.tokens[7] = list(decoding.tokens[1])
    decoding.again(7, decoding.step(7)[0])


def test_nothing_is_computed_behind_the_last_position(stages: Stages) -> None:
    decoding = Decoding(stages, 1)
    while len(decoding.tokens[1]) < LAST_POSITION:
        logits = decoding.step(1)
    decoding.again(1, logits[0])
    assert decoding.engine.save(1).length == LAST_POSITION - 1


def test_wrong_guesses_become_rare() -> None:
    ahead, rows, logits = LookAhead(lambda row: None), (Row(1, 9, 1, 1),), np.eye(4, dtype=np.float32)[:1]
    tries = 0
    for _ in range(4 * LONGEST_PAUSE):
        ahead.showed(rows, logits)
        ahead.take(rows, (0,))
        if ahead.is_due:
            tries += 1
            ahead.showed(rows, logits)
            ahead.take(rows, (3,))
    assert tries < 12

"""What a llama.cpp stage saved in one process continues in another with the same bits."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from exo_mesh_llamacpp import provider
from exo_mesh_llamacpp.stage import LlamaCppStage

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import LoadRequest, SavedSequence, StageInput
from tests.support.checkpoints import TinyModel, write_checkpoint

pytestmark = [
    pytest.mark.skipif(not provider.availability().available, reason="xllamacpp is not installed"),
]

PROMPT, STEPS = 37, 4
DEADLINE_S = 60.0


def stage_of(directory: Path) -> LlamaCppStage:
    made = provider.create()
    assert isinstance(made, LlamaCppStage)
    made.load(LoadRequest(Shard("tiny", 0, 2, 2), directory, 128, {"threads": "1"}), lambda done, total: None)
    return made


def steps(stage: LlamaCppStage, sequence: int) -> np.ndarray:
    found = []
    for pos0 in range(PROMPT, PROMPT + STEPS):
        logits = stage.forward(StageInput((Row(sequence, pos0, 1, 1),), (pos0 % 7 + 1,), {})).logits
        assert logits is not None
        found.append(logits.copy())
    return np.concatenate(found)


def save(connection: Connection, directory: Path) -> None:
    """Runs in another process: computes a prompt, sends its state, and then the logits of some steps."""
    stage = stage_of(directory)
    stage.insert(5, 128)
    stage.forward(StageInput((Row(5, 0, PROMPT, 1),), tuple(range(1, PROMPT + 1)), {}))
    saved = stage.save(5)
    tensors = {name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in saved.tensors.items()}
    connection.send((saved.length, tensors))
    connection.send(steps(stage, 5))


def test_a_sequence_continues_in_another_process_with_the_same_bits(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, TinyModel(layers=2))
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=save, args=(far, directory))
    process.start()
    far.close()
    try:
        assert near.poll(DEADLINE_S), "the other process saves"
        length, tensors = near.recv()
        assert near.poll(DEADLINE_S), "the other process goes on"
        want = near.recv()
    finally:
        near.close()
        process.join(10)
        process.kill()
    saved = SavedSequence(length, {name: Tensor(*parts) for name, parts in tensors.items()})
    stage = stage_of(directory)
    try:
        stage.insert(1, 128)
        stage.forward(StageInput((Row(1, 0, 3, 0),), (1, 2, 3), {}))  # so that the slot is another one
        stage.restore(2, 128, saved)
        np.testing.assert_array_equal(steps(stage, 2), want)
    finally:
        stage.close()

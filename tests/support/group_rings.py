"""Rings of real runner processes on loopback in which some stages are tensor groups, and what one process computes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from exo_mesh_mlx import provider

from exo_mesh.cli.bench.local_ring import LocalRunner
from exo_mesh.domain.frame import Row
from exo_mesh.domain.plan import Ballot, Plan, PlanInputs, StagePlan
from exo_mesh.domain.request import GenerateRequest, SamplingParams
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor_group import TensorGroup
from exo_mesh.wire.control_driver import DriverChannels, Silences, complete
from tests.support.ring import Ring

CONTEXT = 512
FIRST_S, NEXT_S = 90.0, 60.0
"""Longest silences: two ranks share two cores with everything else, and spin."""

_numbers = itertools.count()


def group_plan(sizes: Sequence[int], num_layers: int) -> Plan:
    """One stage per size: of one peer, or of a tensor group of so many; layers shared out evenly."""
    stages: list[StagePlan] = []
    for index, size in enumerate(sizes):
        peers = tuple(f"p{index}.{rank}" for rank in range(size))
        start, stop = (num_layers * place // len(sizes) for place in (index, index + 1))
        shard = Shard("tiny", start, stop, num_layers)
        stages.append(StagePlan(peers[0], "mlx", shard, 0, TensorGroup("ring", peers) if size > 1 else None))
    inputs = PlanInputs((), "memory", 1)
    return Plan("group", Ballot(1, "test"), "tiny", "digest", tuple(stages), CONTEXT, inputs, 4 * CONTEXT)


async def generate(
    channels: DriverChannels, runners: Sequence[LocalRunner], plan: Plan, prompt: Sequence[int], max_tokens: int
) -> list[int]:
    """The greedy tokens of one request; raises what the ring answers."""
    request = GenerateRequest(
        f"r{next(_numbers)}", tuple(prompt), max_tokens, SamplingParams(temperature=0.0), ignore_eos=True
    )
    call = channels.open(f"127.0.0.1:{runners[-1].port}", plan, request, Silences(FIRST_S, NEXT_S, FIRST_S))
    return await complete(call, FIRST_S)


def prompts(number: int, seed: int = 5) -> list[list[int]]:
    """Of 9 to 40 random tokens."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, int(random.integers(9, 41))).tolist() for _ in range(number)]


def greedy_alone(model_dir: Path, num_layers: int, wanted: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """What one process makes of each prompt, one after the other."""
    ring = Ring(provider, model_dir, num_layers, ())
    answers = []
    for sequence, prompt in enumerate(wanted):
        ring.insert(sequence, max_tokens=CONTEXT)
        ids, drawn = list(prompt), []
        logits = ring.forward([Row(sequence, 0, len(ids), 1)], np.array(ids))
        for _ in range(max_tokens):
            drawn.append(int(logits[-1].argmax()))
            logits = ring.forward([Row(sequence, len(ids) + len(drawn) - 1, 1, 1)], np.array(drawn[-1:]))
        ring.remove(sequence)
        answers.append(drawn)
    ring.close()
    return answers

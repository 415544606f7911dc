"""`python -m tools.architectures.speed MODEL_DIR`: compares an unsplit MLX stage with mlx-lm's generation.

Decode steps of one sequence by mlx-lm's generate_step, by a bare loop over the model, and by a stage, in turns; then of
1, 4 and 8 sequences by a stage, together and row by row. Milliseconds per step, medians. The processor time of all
threads is what to look at on a machine that does other things too; elapsed time is beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from exo_mesh_mlx.engine import MlxStage
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageInput

PROMPT = list(range(40, 60))
CONTEXT = 2048
ROWS = (1, 4, 8)

Times = tuple[float, float]
"""(processor, elapsed) milliseconds."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.architectures.speed", description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    model, _ = load_model(options.model_dir)
    stage = MlxStage()
    layers = len(model.layers)
    shard = Shard("m", 0, layers, layers)
    stage.load(LoadRequest(shard, options.model_dir, CONTEXT), lambda done, total: None)
    ways: dict[str, Callable[[int], Times]] = {
        "mlx-lm generate_step": lambda steps: by_generate_step(model, steps),
        "bare loop over the model": lambda steps: by_bare_loop(model, steps),
        "stage": lambda steps: by_stage(stage, 1, steps),
    }
    taken: dict[str, list[Times]] = {name: [] for name in ways}
    for way in ways.values():
        way(2)  # warm-up
    for _ in range(options.rounds):
        for name, way in ways.items():
            taken[name].append(way(options.steps))
    for name, times in taken.items():
        _print(name, _median(times))
    can = stage.batched
    for rows in ROWS:
        for together in (False, True) if can else (False,):
            stage.batched = together
            name = f"stage, {rows} rows {'together' if together else 'row by row'}"
            _print(name, _median([by_stage(stage, rows, options.steps) for _ in range(3)]))


def by_generate_step(model: Any, steps: int) -> Times:
    generated = generate_step(mx.array(PROMPT), model, max_tokens=steps + 1)
    next(generated)
    return _per_step(steps, lambda _: next(generated))


def by_bare_loop(model: Any, steps: int) -> Times:
    cache = make_prompt_cache(model)
    token = int(mx.argmax(model(mx.array([PROMPT]), cache=cache)[0, -1]))

    def step(_: int) -> None:
        nonlocal token
        token = int(np.array(model(mx.array([[token]]), cache=cache)[0, -1]).argmax())

    return _per_step(steps, step)


def by_stage(stage: MlxStage, rows: int, steps: int) -> Times:
    tokens = []
    for sequence in range(rows):
        stage.insert(sequence, CONTEXT)
        prompt = tuple(PROMPT[: len(PROMPT) - sequence])
        tokens.append(_greedy(stage, (Row(sequence, 0, len(prompt), 1),), prompt)[0])

    def step(index: int) -> None:
        at = [len(PROMPT) - sequence + index for sequence in range(rows)]
        tokens[:] = _greedy(stage, tuple(Row(i, pos0, 1, 1) for i, pos0 in enumerate(at)), tuple(tokens))

    times = _per_step(steps, step)
    for sequence in range(rows):
        stage.remove(sequence)
    return times


def _greedy(stage: MlxStage, rows: tuple[Row, ...], token_ids: tuple[int, ...]) -> list[int]:
    logits = stage.forward(StageInput(rows, token_ids, {})).logits
    assert logits is not None
    return [int(token) for token in logits.argmax(axis=-1)]


def _per_step(steps: int, step: Callable[[int], Any]) -> Times:
    processor, elapsed = time.process_time(), time.perf_counter()
    for index in range(steps):
        step(index)
    return 1e3 * (time.process_time() - processor) / steps, 1e3 * (time.perf_counter() - elapsed) / steps


def _median(times: list[Times]) -> Times:
    processor, elapsed = np.median(np.array(times), axis=0)
    return float(processor), float(elapsed)


def _print(name: str, times: Times) -> None:
    print(f"{name:32} {times[0]:9.2f} ms processor {times[1]:9.2f} ms elapsed", flush=True)


if __name__ == "__main__":
    main()

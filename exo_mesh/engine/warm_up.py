"""The forward passes of a first request, with made-up input: engines run them after a load."""

from __future__ import annotations

import logging
import math
import time

from exo_mesh.domain.frame import Row
from exo_mesh.domain.tensor import ITEM_BYTES, Tensor
from exo_mesh.engine.contract import StageEngine, StageInput, Warmable
from exo_mesh.errors import EngineError

SEQUENCE = -1
"""No request has this number."""

PROMPT_TOKENS = 16
"""Tokens of the made-up prompt on a GPU: enough for the kernels of prompts, which differ from the kernels of one
token."""

CPU_TOKENS = 2
"""The same on a CPU, where nothing is compiled and each token costs as much time as in an answer: a stage that replaces
a lost one has no time to lose."""


_log = logging.getLogger(__name__)


def warm_up(engine: Warmable, context_limit: int) -> None:
    """Let a loaded engine run its first passes, and log how long they took. Raises nothing."""
    begin = time.perf_counter()
    try:
        engine.warm_up(context_limit)
    except EngineError as exc:
        _log.warning("the warm-up failed, and the first request may fail too: %s", exc)
    _log.info("warmed up in %.2f s", time.perf_counter() - begin)


def run_first_passes(stage: StageEngine, context_limit: int, *, on_gpu: bool) -> None:
    """Compute a short prompt and a decode step of zeros on a loaded stage. Leaves no sequence behind. Raises
    EngineError, also if the stage refuses a row."""
    num_tokens = min(PROMPT_TOKENS if on_gpu else CPU_TOKENS, context_limit - 1)
    if num_tokens < 1:
        return
    stage.insert(SEQUENCE, num_tokens + 1)
    try:
        _run(stage, Row(SEQUENCE, 0, num_tokens, 1))
        _run(stage, Row(SEQUENCE, num_tokens, 1, 1))
    finally:
        stage.remove(SEQUENCE)


def _run(stage: StageEngine, row: Row) -> None:
    shapes = {spec.name: (spec.dtype, (row.n, *spec.item_shape)) for spec in stage.capabilities.inputs}
    tensors = {
        name: Tensor(dtype, shape, bytes(math.prod(shape) * ITEM_BYTES[dtype]))
        for name, (dtype, shape) in shapes.items()
    }
    output = stage.forward(StageInput((row,), (0,) * row.n, tensors))
    if output.faults:
        raise EngineError(output.faults[0].message)

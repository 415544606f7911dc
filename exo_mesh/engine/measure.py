"""Measures any engine through its contract: a slice of few layers in seconds, or a whole model.

Runs in a process of its own (rings/runner/asking/measure.py), because it loads weights and imports heavy libraries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh.domain.model import ModelCard
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.bandwidth import Bandwidth, bandwidth_of
from exo_mesh.engine.contract import EngineProvider, LoadRequest, StageEngine, StageInput, Surveyor, TensorSpec
from exo_mesh.errors import EngineError
from exo_mesh.weights.card import read_card

ROWS = (1, 2, 4, 8, 16)
DEPTH = 64
"""Positions that each sequence holds while its decode steps are timed."""
PREFILLS = (32, 64, 128, 256)
"""Prompt lengths; a slow machine is measured with the longest that fits its share of the budget."""
PREFILL_CHUNK = 512
"""The scheduler's default size of a prompt chunk."""
BUDGET_S = 2.0
"""Seconds for the timed forwards of a slice, all together; importing and loading come on top."""
MAX_REPEATS = 64
PROMPTS = 5


class SliceFigures(msgspec.Struct, frozen=True):
    """Seconds of a forward of layers `[start, stop)`, and the figures that belong to it.

    decode_s: by number of rows of one token each. prefill_s: of one row of prefill_tokens. held_bytes: what the slice
    takes, as the engine counts.
    """

    start: int
    stop: int
    num_layers: int
    held_bytes: int
    load_s: float
    decode_s: Mapping[int, float]
    prefill_tokens: int
    prefill_s: float
    bandwidth: Bandwidth


class TimedGeneration(NamedTuple):
    """Seconds of one answer: the prompt until its first token, then `num_steps` steps of one token each."""

    prefill_s: float
    decode_s: float
    num_steps: int


Loop = Callable[[Sequence[int], int], TimedGeneration]
"""Answers a prompt of token ids greedily with one token and `steps` more, whatever the tokens are."""


def measure_slice(
    provider: EngineProvider, model_dir: Path, options: Mapping[str, str], budget_s: float = BUDGET_S
) -> SliceFigures:
    """Load the smallest slice in the middle of a model and time it on random activations.

    An engine that declares no inputs, or refuses random ones, is timed on its first slice, which needs none. Raises
    ModelError or EngineError as the engine does.
    """
    card = read_card(model_dir, model_dir.name)
    cuts = provider.survey(model_dir, options).legal_cuts if isinstance(provider, Surveyor) else card.legal_cuts
    bounds = (0, *cuts, card.num_layers)
    middle = next(index for index, stop in enumerate(bounds[1:]) if stop > card.num_layers // 2)
    refusal: EngineError | None = None
    for index in dict.fromkeys((middle, 0)):
        shard = Shard(card.name, bounds[index], bounds[index + 1], card.num_layers)
        engine = provider.create()
        try:
            return _time_slice(engine, shard, model_dir, options, card, budget_s)
        except EngineError as exc:
            refusal = exc
        finally:
            engine.close()
    assert refusal is not None
    raise refusal


def open_loop(provider: EngineProvider, model_dir: Path, options: Mapping[str, str]) -> tuple[Loop, StageEngine]:
    """Load a whole model as one stage; returns a greedy loop over it, and the stage."""
    card = read_card(model_dir, model_dir.name)
    engine = provider.create()
    shard = Shard(card.name, 0, card.num_layers, card.num_layers)
    engine.load(LoadRequest(shard, model_dir, card.context_length, options), lambda done, total: None)
    return lambda prompt, steps: _generate(engine, prompt, steps), engine


def decode_bytes(card: ModelCard, held_bytes: int) -> int:
    """The part of held_bytes that a decode step reads: everything but the embedding, where it reads one row."""
    read = sum(card.layer_bytes) + card.head_bytes
    total = sum(card.layer_bytes) + card.head_bytes + (0 if card.tied else card.embed_bytes)
    return held_bytes * read // total


def share_bytes(provider: EngineProvider, model_dir: Path, shard: Shard, options: Mapping[str, str]) -> int:
    """Bytes of a shard's tensors as the engine holds them, if it has a survey; otherwise as they are in the files."""
    survey = provider.survey(model_dir, options) if isinstance(provider, Surveyor) else None
    if survey is None or not survey.layer_bytes:
        return read_card(model_dir, shard.model).shard_bytes(shard.start, shard.stop)
    ends = (survey.embed_bytes if shard.is_first else 0) + (survey.head_bytes if shard.is_last else 0)
    return sum(survey.layer_bytes[shard.start : shard.stop]) + ends


def made_up(specs: Sequence[TensorSpec], num_tokens: int, rng: np.random.Generator) -> dict[str, Tensor]:
    """Random activations in place of a previous stage: normal deviates, and zeros for tensors that hold no floats."""
    return {spec.name: _made_up(spec.dtype, (num_tokens, *spec.item_shape), rng) for spec in specs}


def _made_up(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    values = rng.standard_normal(shape, np.float32)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values.view(np.uint32) >> 16).astype(np.uint16)
        return Tensor(dtype, shape, bits.tobytes())
    return Tensor.from_numpy(values.astype(dtype) if dtype.startswith("float") else np.zeros(shape, dtype))


def _time_slice(
    engine: StageEngine, shard: Shard, model_dir: Path, options: Mapping[str, str], card: ModelCard, budget_s: float
) -> SliceFigures:
    begin = time.perf_counter()
    request = LoadRequest(shard, model_dir, card.context_length, options)
    engine.load(request, lambda done, total: None)
    load_s, held = time.perf_counter() - begin, engine.memory_bytes()
    if not shard.is_first and not engine.capabilities.inputs:
        raise EngineError(f"a stage of {shard} does not declare its inputs")
    feed = StageFeed(engine, card.vocab_size, int(shard.is_last))
    decode_s = {rows: feed.decode_s(rows, budget_s / (len(ROWS) + 2)) for rows in ROWS}
    prefill, prefill_s = feed.prefill_s(card.context_length, 2 * budget_s / (len(ROWS) + 2))
    return SliceFigures(
        shard.start,
        shard.stop,
        shard.num_layers,
        held,
        load_s,
        decode_s,
        prefill,
        prefill_s,
        bandwidth_of(engine),
    )


class StageFeed:
    """Feeds a stage with rows of random tokens and activations, and times it."""

    def __init__(
        self,
        engine: StageEngine,
        vocab_size: int,
        num_logits: int,
        typical: Callable[[Sequence[float]], float] = median,
    ) -> None:
        """typical: which of the times of several equal passes counts."""
        self._typical = typical
        self._engine = engine
        self._vocab_size = vocab_size
        self._num_logits = num_logits
        self._rng = np.random.default_rng(0)

    def decode_s(self, num_rows: int, budget_s: float) -> float:
        """Typical seconds of one step of num_rows sequences."""
        sequences = range(num_rows)
        for sequence in sequences:
            self._engine.insert(sequence, DEPTH + MAX_REPEATS)
            self._forward([Row(sequence, 0, DEPTH)])
        rows = [[Row(s, DEPTH + index, 1, self._num_logits) for s in sequences] for index in range(MAX_REPEATS)]
        seconds = self._repeat(rows, budget_s)
        for sequence in sequences:
            self._engine.remove(sequence)
        return seconds

    def prefill_s(self, context: int, budget_s: float) -> tuple[int, float]:
        """(tokens, typical seconds) of a prompt in one row, as long as the budget and the context allow."""
        num_tokens, seconds = 0, 0.0
        for longer in PREFILLS:
            if num_tokens and (longer > context or 2 * longer / num_tokens * seconds > budget_s):
                break
            num_tokens = min(longer, context)
            seconds = self.prompt_s(num_tokens, budget_s / len(PREFILLS))
        return num_tokens, seconds

    def prompt_s(self, num_tokens: int, budget_s: float) -> float:
        """Typical seconds of a prompt of num_tokens tokens in one row, computed at most PROMPTS times. Each time it is
        a new sequence, because engines allocate memory for those."""
        seconds: list[float] = []
        deadline = time.perf_counter() + budget_s
        while len(seconds) < PROMPTS and (not seconds or time.perf_counter() < deadline):
            self._engine.insert(0, num_tokens)
            seconds.append(self._forward([Row(0, 0, num_tokens, self._num_logits)]))
            self._engine.remove(0)
        return self._typical(seconds[1:] or seconds)

    def _repeat(self, frames: Sequence[Sequence[Row]], budget_s: float) -> float:
        """Typical time of the frames that fit into the budget; the first one warms up unless it takes all of it."""
        seconds: list[float] = []
        deadline = time.perf_counter() + budget_s
        for rows in frames:
            seconds.append(self._forward(rows))
            if time.perf_counter() > deadline:
                break
        return self._typical(seconds[1:] or seconds)

    def _forward(self, rows: Sequence[Row]) -> float:
        num_tokens = sum(row.n for row in rows)
        ids = tuple(self._rng.integers(0, self._vocab_size, num_tokens).tolist())
        tensors = made_up(self._engine.capabilities.inputs, num_tokens, self._rng)
        begin = time.perf_counter()
        output = self._engine.forward(StageInput(tuple(rows), ids, tensors))
        seconds = time.perf_counter() - begin
        if output.faults:
            raise EngineError(f"a row was refused: {output.faults[0].message}")
        return seconds


def _generate(engine: StageEngine, prompt: Sequence[int], num_steps: int) -> TimedGeneration:
    sequence, length = 1, len(prompt)
    engine.insert(sequence, length + num_steps)
    begin = time.perf_counter()
    token = 0
    for pos0 in range(0, length, PREFILL_CHUNK):
        part = prompt[pos0 : pos0 + PREFILL_CHUNK]
        token = _next_token(engine, Row(sequence, pos0, len(part), int(pos0 + len(part) == length)), part)
    first = time.perf_counter()
    for pos0 in range(length, length + num_steps):
        token = _next_token(engine, Row(sequence, pos0, 1, 1), (token,))
    end = time.perf_counter()
    engine.remove(sequence)
    return TimedGeneration(first - begin, end - first, num_steps)


def _next_token(engine: StageEngine, row: Row, ids: Sequence[int]) -> int:
    output = engine.forward(StageInput((row,), tuple(ids), {}))
    if output.faults or output.logits is None:
        raise EngineError(f"a row was refused: {'; '.join(fault.message for fault in output.faults)}")
    return int(output.logits[-1].argmax()) if row.num_logits else 0

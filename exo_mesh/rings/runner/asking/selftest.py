"""`python -m exo_mesh.rings.runner.asking.selftest ENGINE MODEL_DIR SCRATCH_DIR RANGES [OPTIONS]`: computes a few
layers for comparison.

RANGES: `0:1,5:6`, half-open. OPTIONS: a JSON object of engine options. Two engines must give nearly equal outputs for
equal inputs before their stages may join one ring. Inputs are the same on every machine: token ids and hidden states
follow from a counter. The layers are the model's own, in float32, with windows of a few tokens.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from exo_mesh.domain.frame import HIDDEN, Row
from exo_mesh.domain.model_settings import text_config
from exo_mesh.domain.shard import Shard
from exo_mesh.domain.tensor import Tensor
from exo_mesh.engine.contract import (
    EngineProvider,
    LoadRequest,
    StageEngine,
    StageInput,
    StageOutput,
    TensorSpec,
)
from exo_mesh.engine.registry import provider
from exo_mesh.errors import EngineError, InputError, MeshError
from exo_mesh.rings.runner.asking.lifeline import tie
from exo_mesh.weights.card import read_card
from exo_mesh.weights.excerpt import write_excerpt
from exo_mesh.weights.model_files import read_json, without_paths

FRAMES = (23, 17, 1, 1, 1)
"""Tokens of each frame: a prompt of 40 in two chunks, neither a multiple of the window, then three decode steps."""

NUM_TOKENS = sum(FRAMES)
MAX_VALUES = 65_536
"""Values of one tensor sent for comparison, evenly spaced: a structural mistake shows in all of them."""

_SEQUENCE = 1

Outputs = dict[str, np.ndarray]
"""float32 `[43, …]` by name; the last range also has `logits` `[5, vocab]`, of the last token of each frame."""


def counted_values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values of unit variance that depend only on the name and on their place, on any machine and version."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    raw = np.random.Philox(key=key).random_raw(int(np.prod(shape)))
    uniform = (raw >> np.uint64(40)).astype(np.float64) / 2**24  # 24 bits: exact in float32
    return ((uniform - 0.5) * 12**0.5).astype(np.float32).reshape(shape)


def token_ids(vocab_size: int) -> tuple[int, ...]:
    """The prompt and the tokens of the decode steps."""
    raw = np.random.Philox(key=1).random_raw(NUM_TOKENS)
    return tuple(int(value % np.uint64(vocab_size)) for value in raw)


def compute(engine: StageEngine, shard: Shard, hidden_size: int, vocab_size: int) -> Outputs:
    """The outputs of the engine for a loaded shard. Raises EngineError if a row fails."""
    specs = list(engine.capabilities.inputs) or [TensorSpec(HIDDEN, "float32", (hidden_size,))]
    fed = {} if shard.is_first else {
        spec.name: counted_values(f"{shard.start} {spec.name}", (NUM_TOKENS, *spec.item_shape)) for spec in specs
    }  # fmt: skip
    ids = token_ids(vocab_size)
    parts: dict[str, list[np.ndarray]] = {}
    engine.insert(_SEQUENCE, NUM_TOKENS)
    begin = 0
    for n in FRAMES:
        row = Row(_SEQUENCE, begin, n, 1 if shard.is_last else 0)
        tensors = {name: Tensor.from_numpy(values[begin : begin + n]) for name, values in fed.items()}
        output = engine.forward(StageInput((row,), ids[begin : begin + n], tensors))
        for name, values in _values(output):
            parts.setdefault(name, []).append(values)
        begin += n
    engine.remove(_SEQUENCE)
    return {name: np.concatenate(values) for name, values in parts.items()}


def _values(output: StageOutput) -> Iterator[tuple[str, np.ndarray]]:
    if output.faults:
        raise EngineError(output.faults[0].message)
    if output.logits is not None:
        yield "logits", np.asarray(output.logits, np.float32)
    for name, tensor in output.tensors.items():
        values = tensor.numpy()
        if tensor.dtype == "bfloat16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        yield name, np.asarray(values, np.float32)


def sample(values: np.ndarray) -> np.ndarray:
    """At most MAX_VALUES of the values, float32, evenly spaced over all."""
    flat = values.reshape(-1)
    step = -(-flat.size // MAX_VALUES) if flat.size else 1
    while math.gcd(step, values.shape[-1]) > 1:
        step += 1  # with a common divisor, only the same few columns of every token would be compared
    return np.ascontiguousarray(flat[::step], np.float32)


def load(found: EngineProvider, request: LoadRequest) -> StageEngine:
    """Create and load an engine; in float32 if it offers a choice of dtypes."""
    for options in ({**request.options, "dtype": "float32"}, request.options):
        engine = found.create()
        try:
            engine.load(
                LoadRequest(request.shard, request.model_dir, request.context_limit, options, request.activation_dtype),
                lambda done, total: None,
            )
            return engine
        except InputError as exc:
            if exc.param != "dtype" or options is request.options:
                raise
    raise AssertionError("one of the two has returned or raised")


def native_dtype(found: EngineProvider, model_dir: Path, shard: Shard, options: Mapping[str, str]) -> str:
    """The dtype of the tensors that the engine passes on in a ring of its own, for the model as it is on disk; empty if
    it passes on none."""
    engine = found.create()
    engine.load(LoadRequest(shard, model_dir, NUM_TOKENS, options), lambda done, total: None)
    engine.insert(_SEQUENCE, 1)
    output = engine.forward(StageInput((Row(_SEQUENCE, 0, 1, int(shard.is_last)),), (0,), {}))
    engine.close()
    return next((tensor.dtype for tensor in output.tensors.values()), "")


def run(
    engine_name: str, model_dir: Path, scratch: Path, ranges: Sequence[tuple[int, int]], options: Mapping[str, str]
) -> dict[str, Any]:
    """Compute all ranges; returns the reply of a self-test as JSON values, see SelfTestReply in control.proto."""
    found = provider(engine_name)
    card = read_card(model_dir, model_dir.name)
    layers = {layer for start, stop in ranges for layer in range(start, stop)}
    excerpt = write_excerpt(model_dir, scratch, layers)
    vocab_size = vocabulary_of(excerpt)
    first = next((shard for shard in ranges if shard[0] == 0), None)
    native = "" if first is None else native_dtype(
        found, model_dir, Shard(card.name, *first, card.num_layers), options
    )  # fmt: skip
    results = []
    for start, stop in ranges:
        shard = Shard(card.name, start, stop, card.num_layers)
        engine = load(found, LoadRequest(shard, excerpt, NUM_TOKENS, options, "float32"))
        outputs = compute(engine, shard, card.hidden_size, vocab_size)
        declared = engine.capabilities
        engine.close()
        results.append(
            {
                "range": [start, stop],
                "outputs": {name: _text(sample(values)) for name, values in outputs.items()},
                "inputs": [_spec(spec) for spec in declared.inputs],
                "given": [_spec(spec) for spec in declared.outputs],
            }
        )
    return {"version": found.version(), "native_dtype": native, "results": results}


def vocabulary_of(model_dir: Path) -> int:
    """The number of token ids that the excerpt has rows for."""
    return int(text_config(read_json(model_dir / "config.json"))["vocab_size"])


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _spec(spec: TensorSpec) -> list[Any]:
    return [spec.name, spec.dtype, list(spec.item_shape)]


def parse_ranges(text: str) -> list[tuple[int, int]]:
    """Parse `0:1,5:6`. Raises ValueError."""
    return [(int(start), int(stop)) for start, _, stop in (item.partition(":") for item in text.split(","))]


def main(argv: list[str]) -> int:
    """Print {"results": …}, or {"error": …} and return 1. Any exception of a foreign library counts as an error of its
    engine."""
    engine, model_dir, scratch, ranges, *rest = argv
    code = 0
    try:
        with TemporaryDirectory(dir=scratch, prefix="selftest-") as own:
            options = json.loads(rest[0]) if rest else {}
            answer = run(engine, Path(model_dir), Path(own), parse_ranges(ranges), options)
    except MeshError as exc:
        answer, code = {"error": without_paths(str(exc), Path(model_dir)), "code": exc.code}, 1
    except Exception as exc:  # noqa: BLE001 - last handler of the process: the node must get every error
        answer, code = {"error": f"{type(exc).__name__}: {exc}", "code": EngineError.code}, 1
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(tie(sys.argv[1:])))

"""`python -m exo_mesh_numpy.bench`: measures how fast this machine runs a Llama, compared with plain NumPy.

It compares with two references, over the matrices of the same model. *products*: only NumPy's products of the weights,
which is the limit of memory or BLAS; no engine reaches it. *loop*: a simple forward pass in NumPy, for one sequence.
Weights are random. All candidates run in turns, so that other load on the machine affects them alike.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageInput
from exo_mesh_numpy.engine import NumpyStage
from exo_mesh_numpy.model_config import ModelConfig, read_model_config
from exo_mesh_numpy.plain import PlainLoop
from exo_mesh_numpy.weights import EMBEDDING, FINAL_NORM, HEAD, LayerWeights, StageWeights, norms, projections

CHUNK = 256
"""Tokens of a prefill chunk."""

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}


def main(argv: list[str]) -> int:
    """Print tokens per second and their ratios, for each mode."""
    parser = argparse.ArgumentParser(prog="python -m exo_mesh_numpy.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--steps", type=int, default=20, help="number of decode steps, and of turns of each measurement"
    )
    parser.add_argument("--context", type=int, default=128, help="length of each sequence when decoding begins")
    parser.add_argument("--modes", default="fast,deterministic")
    parser.add_argument(
        "--cpu-time", action="store_true", help="measure CPU time: for busy machines, with OPENBLAS_NUM_THREADS=1"
    )
    args = parser.parse_args(argv)
    clock = time.process_time if args.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as directory:
        config = write_model(Path(directory), args.layers)
        for mode in args.modes.split(","):
            stage = NumpyStage()
            shard = Shard("bench", 0, args.layers, args.layers)
            request = LoadRequest(shard, Path(directory), 4096, {"mode": mode})
            began = clock()
            stage.load(request, lambda done, total: None)
            say(f"{mode}: {shard.num_layers} layers loaded in {clock() - began:.2f} s")
            report(stage, config, args.steps, args.context, clock)
            stage.close()
    return 0


def report(stage: NumpyStage, config: ModelConfig, steps: int, context: int, clock: Callable[[], float]) -> None:
    weights = stage.weights
    num_bytes = matrix_bytes(weights)
    say(f"  {num_bytes / 4e6:.0f} M weights in the products, {num_bytes / 1e6:.0f} MB")
    rng = np.random.default_rng(1)
    for rows in (1, 2, 4, 16):
        loop = [plain(weights, config, context, 1)] if rows == 1 else []
        ours = decoder(stage, rows, context, config.vocab_size, rng)
        taken = alternate([ours, products(weights, rows), *loop], steps, clock)
        say(f"  decode x {rows}: {compared(rows, taken)}")
        if rows == 1:
            say(f"    which reads {num_bytes / taken[0] / 1e9:.1f} of {num_bytes / taken[1] / 1e9:.1f} GB/s")
    prefill = [prefiller(stage, config.vocab_size, rng), products(weights, CHUNK, 1), plain(weights, config, 0, CHUNK)]
    say(f"  prefill of {CHUNK}: {compared(CHUNK, alternate(prefill, max(3, steps // 5), clock))}")


def compared(tokens: int, taken: list[float]) -> str:
    """One line of figures. taken: seconds of the engine, of the products, and perhaps of the plain loop."""
    text = f"{tokens / taken[0]:.1f} tok/s; products {tokens / taken[1]:.1f}, ratio {taken[1] / taken[0]:.3f}"
    return text + (f"; loop {tokens / taken[2]:.1f}, ratio {taken[2] / taken[0]:.3f}" if len(taken) > 2 else "")


def alternate(actions: list[Callable[[], None]], turns: int, clock: Callable[[], float]) -> list[float]:
    """Median seconds of each action; the actions run in turns, after one turn that does not count."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(turns + 1):
        for action, own in zip(actions, times, strict=True):
            began = clock()
            action()
            own.append(clock() - began)
    return [float(np.median(own[1:])) for own in times]


def plain(weights: StageWeights, config: ModelConfig, context: int, tokens: int) -> Callable[[], None]:
    """One step of the plain loop: `tokens` more after `context` positions."""
    loop = PlainLoop(config, weights, context + tokens)
    ids = np.arange(context + tokens) % config.vocab_size
    if context:
        loop.forward(ids[:context], 0)

    def run() -> None:
        loop.forward(ids[context:], context)

    return run


def decoder(
    stage: NumpyStage, rows: int, context: int, vocab_size: int, rng: np.random.Generator
) -> Callable[[], None]:
    """One decode step of `rows` sequences, each of `context` positions; each call repeats the same step."""
    for sequence in range(rows):
        stage.remove(sequence)
        stage.insert(sequence, context + 1)
        ids = tuple(rng.integers(0, vocab_size, context).tolist())
        stage.forward(StageInput((Row(sequence, 0, context),), ids, {}))
    step = StageInput(tuple(Row(i, context, 1, 1) for i in range(rows)), tuple(range(rows)), {})

    def run() -> None:
        stage.forward(step)

    return run


def prefiller(stage: NumpyStage, vocab_size: int, rng: np.random.Generator) -> Callable[[], None]:
    stage.insert(-1, CHUNK)
    ids = tuple(rng.integers(0, vocab_size, CHUNK).tolist())

    def run() -> None:
        stage.forward(StageInput((Row(-1, 0, CHUNK, 1),), ids, {}))

    return run


def matrices(layer: LayerWeights) -> list[np.ndarray]:
    return [layer.qkv.weight, layer.output.weight, layer.gate_up.weight, layer.down.weight]


def matrix_bytes(weights: StageWeights) -> int:
    """Bytes of all matrices that a token passes."""
    assert weights.head is not None
    return weights.head.nbytes + sum(matrix.nbytes for layer in weights.layers for matrix in matrices(layer))


def products(weights: StageWeights, rows: int, head_rows: int | None = None) -> Callable[[], None]:
    """NumPy's own products of the model, one call per matrix, and nothing else."""
    assert weights.head is not None
    inputs: dict[tuple[int, int], np.ndarray] = {}
    jobs = [(matrix, rows) for layer in weights.layers for matrix in matrices(layer)]
    jobs.append((weights.head, head_rows or rows))
    outputs: dict[tuple[int, int], np.ndarray] = {}
    for matrix, count in jobs:
        inputs.setdefault((count, matrix.shape[1]), np.ones((count, matrix.shape[1]), np.float32))
        outputs.setdefault((count, len(matrix)), np.empty((count, len(matrix)), np.float32))

    def run() -> None:
        for matrix, count in jobs:
            np.matmul(inputs[count, matrix.shape[1]], matrix.T, out=outputs[count, len(matrix)])

    return run


def write_model(directory: Path, num_layers: int) -> ModelConfig:
    """Write config.json and model.safetensors with random float32 weights."""
    (directory / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers}))
    config = read_model_config(directory)
    shapes: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: (size,) for name, size in norms(config).items()}
        parts = [part for joined in projections(config).values() for part in joined]
        shapes |= {f"{prefix}{part.name}.weight": (part.rows, part.columns) for part in parts}
    shapes[FINAL_NORM] = (config.hidden_size,)
    shapes[f"{HEAD}.weight"] = (config.vocab_size, config.hidden_size)
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for shape in shapes.values():
            stream.write((rng.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5).data)
    return config


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

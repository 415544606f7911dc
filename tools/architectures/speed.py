"""`python -m tools.architectures.speed mlx|torch [MODEL_DIR]`: compares an unsplit stage with the library's own loop.

The prompt and greedy decode steps of one sequence by the library and by a stage, in turns, so that other work on the
machine hits all alike; then steps of 1, 4 and 8 sequences by the stage. Medians of tokens per second: of the processor
time of all threads, which is what to look at on a machine that does other things too, and of elapsed time. Without
MODEL_DIR: a random Llama of 125 M parameters.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from exo_mesh.domain.frame import Row
from exo_mesh.domain.shard import Shard
from exo_mesh.engine.contract import LoadRequest, StageEngine
from exo_mesh.weights.card import read_card
from exo_mesh.weights.random_checkpoint import TinyModel, write_checkpoint
from tools.stages import forward, insert, remove

SIZES = {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 4, "intermediate": 2048, "vocab": 32000, "context": 2048}
ROWS = (1, 4, 8)
Loop = Callable[[list[int]], Iterator[Any]]
"""Computes a prompt, then a decode step for each further item."""


def mlx_loops(directory: Path, _threads: str) -> dict[str, Loop]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(directory)

    def bare(prompt: list[int]) -> Iterator[int]:
        cache, tokens = make_prompt_cache(model), prompt
        while True:
            tokens = [int(np.array(model(mx.array([tokens]), cache=cache)[0, -1].astype(mx.float32)).argmax())]
            yield tokens[0]

    return {
        "mlx-lm generate_step": lambda prompt: generate_step(mx.array(prompt), model, max_tokens=-1),
        "bare loop over the model": bare,
    }


def torch_loops(directory: Path, threads: str) -> dict[str, Loop]:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(int(threads))
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # out of the mapped file, into memory like our engine's

    def greedy(prompt: list[int]) -> Iterator[int]:
        cache, tokens = DynamicCache(config=model.config), prompt
        while True:
            with torch.inference_mode():
                logits = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens = [int(logits[0, -1].argmax())]
            yield tokens[0]

    return {"transformers": greedy}


def stage_loop(stage: StageEngine, rows: int) -> Loop:
    """Sequences of different lengths, each with its own prompt, then steps that all share."""

    def steps(prompt: list[int]) -> Iterator[Any]:
        insert([stage], range(rows))
        at = [len(prompt) - sequence for sequence in range(rows)]
        tokens = np.array([forward([stage], [Row(s, 0, n, 1)], prompt[:n]).argmax() for s, n in enumerate(at)])
        try:
            while True:
                yield tokens
                frame = [Row(sequence, pos0, 1, 1) for sequence, pos0 in enumerate(at)]
                tokens = forward([stage], frame, tokens).argmax(1)
                at = [pos0 + 1 for pos0 in at]
        finally:
            remove([stage], range(rows))

    return steps


def tokens_per_s(loop: Loop, prompt: list[int], steps: int, rows: int = 1) -> np.ndarray:
    """Returns `[2, 2]`: of the prompt and of decode steps, by processor and by elapsed time."""
    times = [(time.process_time(), time.perf_counter())]
    running = loop(prompt)
    for index in range(steps + 1):
        next(running)
        if index in (0, steps):
            times.append((time.process_time(), time.perf_counter()))
    running.close()  # type: ignore[attr-defined]
    return np.array([[rows * len(prompt)], [rows * steps]]) / np.diff(times, axis=0)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.architectures.speed", description=__doc__)
    parser.add_argument("engine", choices=("mlx", "torch"))
    parser.add_argument("model_dir", type=Path, nargs="?")
    parser.add_argument("--dtype", default="bfloat16", help="of the random model")
    parser.add_argument("--threads", default="1", help="of torch")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--steps", type=int, default=24, help="of a turn")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model_dir or write_checkpoint(
            Path(scratch), TinyModel("llama", dtype=options.dtype, **SIZES)
        )
        layers = read_card(directory, "m").num_layers
        provider = import_module(f"exo_mesh_{options.engine}").provider
        stage = provider.create()
        own = {"threads": options.threads} if options.engine == "torch" else {}
        stage.load(LoadRequest(Shard("m", 0, layers, layers), directory, 2048, own), lambda done, total: None)
        loops = {"mlx": mlx_loops, "torch": torch_loops}[options.engine](directory, options.threads)
        _compare(loops, stage, options)
    return 0


def _compare(loops: dict[str, Loop], stage: StageEngine, options: argparse.Namespace) -> None:
    prompt = np.random.default_rng(0).integers(40, 200, options.prompt).tolist()
    loops = {**loops, "stage": stage_loop(stage, 1)}
    for loop in loops.values():
        tokens_per_s(loop, prompt, 2)  # warm-up
    turns = [[tokens_per_s(loop, prompt, options.steps) for loop in loops.values()] for _ in range(options.turns)]
    found = np.median(np.array(turns), axis=0)
    for name, speeds in zip(loops, found, strict=True):
        _print(name, speeds)
    print(f"stage to {next(iter(loops))}: prompt {found[-1, 0, 0] / found[0, 0, 0]:.3f}", end=", ")
    print(f"decode {found[-1, 1, 0] / found[0, 1, 0]:.3f} of processor time")
    can = getattr(stage, "batched", None)
    for rows in ROWS:
        for together in (False, True) if can else (can,):
            if can:
                stage.batched = together  # type: ignore[attr-defined]
            taken = [tokens_per_s(stage_loop(stage, rows), prompt, options.steps, rows) for _ in range(3)]
            _print(f"stage, {rows} rows{'' if can is None or together else ' row by row'}", np.median(taken, axis=0))


def _print(name: str, speeds: np.ndarray) -> None:
    (prompt_cpu, prompt), (decode_cpu, decode) = speeds
    print(f"{name:28}  prompt {prompt_cpu:8.1f} and decode {decode_cpu:8.1f} tokens/s of processor time", end="; ")
    print(f"{prompt:.1f} and {decode:.1f} elapsed", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

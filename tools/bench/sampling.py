"""Measures the time to draw the tokens of one frame.

`python -m tools.bench sampling`

Flat logits are normal with deviation 1. Peaked logits have the shape of a trained model's: a few tokens far above the
rest, which falls off like the frequencies of words (Zipf's law, deviation 1 around it). Each draw has a request of its
own. The kinds alternate, so that other work on the machine affects all alike.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import numpy as np

from exo_mesh.domain.request import GenerateRequest, SamplingParams
from exo_mesh.rings.runner.sampling.sampler import Sampler

VOCABULARIES = (32_000, 128_256, 151_936)
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "t=1": SamplingParams(temperature=1.0),
    "t=0.7 top_p=0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "t=0.7 top_k=40": SamplingParams(temperature=0.7, top_k=40),
}


def made_logits(rows: int, vocabulary: int, *, is_peaked: bool) -> np.ndarray:
    """float32 `[rows, vocabulary]`, the same for each call."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((rows, vocabulary), dtype=np.float32)
    if is_peaked:
        ranks = np.arange(1, vocabulary + 1, dtype=np.float32)
        for row in logits:
            row -= 1.5 * np.log(rng.permutation(ranks))
    return logits


def frame_ms(params: SamplingParams, logits: np.ndarray, position: int) -> float:
    """Milliseconds to draw one token for each row."""
    requests = [GenerateRequest(f"{row}", (1, 2, 3), 8, sampling=params) for row in range(len(logits))]
    samplers = [Sampler(request) for request in requests]
    begin = time.perf_counter()
    for sampler, row in zip(samplers, logits, strict=True):
        sampler.draw(row, position)
    return (time.perf_counter() - begin) * 1e3


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("sampling", help="time to draw the tokens of a frame", description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(f"milliseconds for {args.rows} rows, medians of {args.rounds} rounds")
    print(f"{'vocabulary':>10} {'logits':>7}  " + "  ".join(f"{kind:>16}" for kind in KINDS))
    for vocabulary in VOCABULARIES:
        for shape in ("flat", "peaked"):
            logits = made_logits(args.rows, vocabulary, is_peaked=shape == "peaked")
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for position in range(args.rounds):
                for kind, params in KINDS.items():
                    times[kind].append(frame_ms(params, logits, position))
            print(f"{vocabulary:>10} {shape:>7}  " + "  ".join(f"{median(times[kind]):16.2f}" for kind in KINDS))
    return 0

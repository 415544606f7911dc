"""Trains the demo model: `python -m tools.demo_model.train --millions 12` (two CPU cores are enough).

From nothing, from a checkpoint (`--resume`), or from exported weights with an older, smaller vocabulary (`--start`).
"""

from __future__ import annotations

import argparse
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_model.batches import Batch, training_batches
from tools.demo_model.evaluate import accuracy
from tools.demo_model.export import export
from tools.demo_model.model import DemoModel, Shape
from tools.demo_model.muon import Muon
from tools.demo_model.tasks import TESTED, WEIGHTS
from tools.demo_model.tokenizer import TURN_END, build_tokenizer

STOP_WEIGHT = 2.0  # weight of the end of an answer: a long counting answer has only one
REPORT_EVERY = 300_000  # tokens


@dataclass
class Run:
    """The state of one training run; `average` is a moving average of the weights, which is exported."""

    model: DemoModel
    average: DemoModel
    optimisers: list[torch.optim.Optimizer]
    peaks: list[float]
    token_weights: Tensor
    replicas: list[DemoModel]  # the model, and replicas that share its weights but not its gradients
    pool: ThreadPoolExecutor
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    losses: list[float] = field(default_factory=list)


def new_run(muon_rate: float, adam_rate: float, threads: int) -> Run:
    """Returns a new model with Muon for the matrices of the layers and AdamW for the embedding and the norms."""
    torch.manual_seed(0)
    model, average = DemoModel(), DemoModel()
    average.load_state_dict(model.state_dict())
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    adam = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0)
    token_weights = torch.ones(Shape().vocab)
    token_weights[build_tokenizer().token_to_id(TURN_END)] = STOP_WEIGHT
    replicas = [model, *(sharing(model) for _ in range(threads - 1))]
    optimisers: list[torch.optim.Optimizer] = [Muon(matrices, lr=muon_rate), adam]
    pool = ThreadPoolExecutor(threads)
    return Run(model, average.eval(), optimisers, [muon_rate, adam_rate], token_weights, replicas, pool)


def sharing(model: DemoModel) -> DemoModel:
    """Returns a second model on the same weights: changes affect both, but gradients are separate."""
    other = DemoModel()
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        mine.data = theirs.data
    return other


def rate_factor(done: float) -> float:
    """Learning rate as a share of its peak, for the share `done` of the budget: warm up, hold, fall to 0."""
    return min(1.0, done / 0.01 + 0.02, max(0.0, (1.0 - done) / 0.6))


def gradient(replica: DemoModel, batch: Batch, token_weights: Tensor) -> float:
    """Computes the loss of one batch, and leaves its gradient in the parameters of the replica."""
    ids, places, targets = batch
    loss = F.cross_entropy(replica(ids, places), targets, weight=token_weights)
    loss.backward()
    return loss.item()


def step(run: Run, parts: list[Batch], done: float) -> None:
    """Updates the weights and their average; each thread processes its own batch."""
    pieces = list(run.pool.map(gradient, run.replicas, parts, [run.token_weights] * len(parts)))
    for mine, *others in zip(*(replica.parameters() for replica in run.replicas), strict=True):
        for other in others:
            mine.grad.add_(other.grad)
            other.grad = None
        mine.grad.div_(len(parts))
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for optimiser, peak in zip(run.optimisers, run.peaks, strict=True):
        for group in optimiser.param_groups:
            group["lr"] = peak * rate_factor(done)
        optimiser.step()
        optimiser.zero_grad()
    run.steps += 1
    run.tokens += sum(ids.numel() for ids, _, _ in parts)
    run.losses.append(sum(pieces) / len(pieces))
    keep = min(0.995, run.steps / (run.steps + 10))
    with torch.no_grad():
        torch._foreach_lerp_(list(run.average.parameters()), list(run.model.parameters()), 1 - keep)


def save(run: Run, path: Path) -> None:
    """Writes a checkpoint from which training can resume."""
    state: dict[str, object] = {name: getattr(run, name) for name in ("seconds", "tokens", "steps")}
    state |= {"model": run.model.state_dict(), "average": run.average.state_dict()}
    state["optimisers"] = [optimiser.state_dict() for optimiser in run.optimisers]
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".partial"))
    path.with_suffix(".partial").replace(path)


def restore(run: Run, path: Path) -> None:
    """Resumes from a checkpoint."""
    state = torch.load(path, weights_only=True)
    run.model.load_state_dict(state["model"])
    run.average.load_state_dict(state["average"])
    for optimiser, saved in zip(run.optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    run.seconds, run.tokens, run.steps = state["seconds"], state["tokens"], state["steps"]


def start_from(run: Run, directory: Path) -> None:
    """Loads exported weights; new tokens start as the mean of the tokens that they consisted of before."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    state = load_file(str(directory / "model.safetensors"))
    old = Tokenizer.from_file(str(directory / "tokenizer.json"))
    table = run.model.model.embed_tokens.weight.detach().clone()
    known = old.get_vocab_size()
    table[:known] = state["model.embed_tokens.weight"][:known]
    new = build_tokenizer()
    for token in range(known, new.get_vocab_size()):
        pieces = old.encode(new.decode([token], skip_special_tokens=False)).ids
        table[token] += table[pieces].mean(0)
    state["model.embed_tokens.weight"] = table
    run.model.load_state_dict(state)
    run.average.load_state_dict(state)


def report(run: Run, size: int) -> None:
    """Prints speed, loss and the accuracy of the averaged weights on a few held-out questions of each kind."""
    tokenizer, parts = build_tokenizer(), []
    for kind in TESTED:
        right, asked, _ = accuracy(run.average, tokenizer, kind, size, seed=2)
        parts.append(f"{kind} {100 * right / asked:.0f}")
    loss = sum(run.losses) / max(1, len(run.losses))
    speed = run.tokens / max(run.seconds, 1e-9)
    print(
        f"{run.seconds / 60:.1f} min, step {run.steps}, {run.tokens / 1e6:.2f}M tokens ({speed:.0f}/s), "
        f"loss {loss:.4f} | " + ", ".join(parts),
        flush=True,
    )
    run.losses.clear()


def train(
    run: Run,
    budget: float,
    limit_s: float,
    tokens: int,
    weights: dict[str, float],
    out: Path,
    target: Path | None,
    size: int,
) -> None:
    """Trains until `budget` tokens were seen or `limit_s` seconds used; reports, saves and exports regularly.

    size: held-out questions of each kind in the last report.
    """
    batches = training_batches(build_tokenizer(), seed=run.steps, tokens=tokens, weights=weights)
    last, reported = time.monotonic(), run.tokens
    while (done := max(run.tokens / budget, run.seconds / limit_s)) < 1:
        step(run, [next(batches) for _ in run.replicas], done)
        now = time.monotonic()
        run.seconds, last = run.seconds + now - last, now
        if run.tokens - reported > REPORT_EVERY:
            reported = run.tokens
            finish(run, out, target, size=30)
    finish(run, out, target, size)


def finish(run: Run, out: Path, target: Path | None, size: int) -> None:
    """Saves a checkpoint, reports, and exports the averaged weights."""
    save(run, out)
    report(run, size)
    if target is not None:
        export(run.average.state_dict(), Shape(), target)


def parse_weights(text: str) -> dict[str, float]:
    """Returns the standard mix with changes such as `repeat=40,add=10`."""
    changes = dict(part.split("=") for part in text.split(",") if part)
    return {**WEIGHTS, **{kind: float(value) for kind, value in changes.items()}}


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=12, help="budget of tokens, those of --resume included")
    parser.add_argument("--minutes", type=float, default=math.inf, help="budget of time, that of --resume included")
    parser.add_argument("--start", type=Path, default=None, help="exported directory with the weights to start from")
    parser.add_argument("--out", type=Path, default=Path("build/demo_model/checkpoint.pt"))
    parser.add_argument("--target", type=Path, default=None, help="directory to export to at every report")
    parser.add_argument("--resume", type=Path, default=None, help="checkpoint to resume from")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens in the batch of a thread")
    parser.add_argument("--muon-rate", type=float, default=4e-3)
    parser.add_argument("--adam-rate", type=float, default=4e-3)
    parser.add_argument("--weights", default="", help="changes of the mix, such as repeat=40,add=10")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=200, help="held-out questions of each kind in the last report")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the replicas run in parallel; threads inside an operation would wait too often
    run = new_run(options.muon_rate, options.adam_rate, options.threads)
    if options.resume:
        restore(run, options.resume)
    elif options.start:
        start_from(run, options.start)
    weights, budget = parse_weights(options.weights), options.millions * 1e6
    train(run, budget, options.minutes * 60, options.tokens, weights, options.out, options.target, options.size)


if __name__ == "__main__":
    main()

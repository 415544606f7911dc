"""`python -m tools.bench against-mlx-server` gives a ring and `mlx_lm.server` the same load, alternately.

Takes the flags of `exo-mesh bench serve`. The server runs the same model on this machine, and gets the same requests.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exo_mesh.cli.bench import serve
from exo_mesh.cli.bench.load import Question
from exo_mesh.cli.client.child_node import free_port
from exo_mesh.cli.verbs.bench import print_result
from exo_mesh.errors import DeadlineError, EngineError
from exo_mesh.settings.default_paths import models_dirs
from exo_mesh.settings.loading import load_settings
from exo_mesh.weights.card import read_card
from exo_mesh.weights.store import ModelStore

START_DEADLINE_S = 120.0
_POLL_S = 0.2
NEVER = -100
"""A bias that prevents a token from being drawn."""


def add_parser(subparsers: Any) -> None:
    """Adds `against-mlx-server` to the verbs of `python -m tools.bench`."""
    text = "exo-mesh bench serve, beside mlx_lm.server with the same load"
    parser = subparsers.add_parser("against-mlx-server", help=text, description=__doc__)
    serve.add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints its figures, with ratios to the server's. Raises EngineError without mlx-lm."""
    if why := why_not():
        raise EngineError(why)
    rival = serve.Rival("mlx_lm_server", "mlx_lm.server", mlx_system)
    print_result(serve.run(args, rival), as_json=args.json)
    return 0


@contextlib.contextmanager
def mlx_system(model: serve.BenchModel) -> Iterator[serve.System]:
    """Runs mlx_lm.server with the model for as long as the block lasts.

    The server has no switch to ignore the end of a text, so the end ids get a bias that prevents them.
    """
    directory = model.path or _directory_of(model.name)
    eos_ids = read_card(directory, model.name).eos_ids
    with mlx_server(directory) as url:
        bias = {"logit_bias": {str(token): NEVER for token in eos_ids}}
        yield serve.System(Question("default_model", 0, 0, bias), (url,))


def _directory_of(name: str) -> Path:
    return ModelStore(models_dirs(load_settings({}, os.environ).settings, os.environ)).find(name)


def why_not() -> str:
    """Says why mlx_lm.server cannot run here; "" if it can."""
    if importlib.util.find_spec("mlx_lm") is None:
        return "mlx-lm is not installed here: pip install mlx-lm"
    return ""


@contextlib.contextmanager
def mlx_server(model_dir: Path) -> Iterator[str]:
    """Starts the server and yields its URL once it answers; ends it afterwards. Raises EngineError, DeadlineError."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model_dir)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "WARNING"]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)
        try:
            end = time.monotonic() + START_DEADLINE_S
            while not _answers(url):
                if process.poll() is not None:
                    log.seek(0)
                    raise EngineError(f"mlx_lm.server ended: {log.read()[-300:].decode(errors='replace').strip()}")
                if time.monotonic() > end:
                    raise DeadlineError(f"mlx_lm.server did not answer within {START_DEADLINE_S:g} s")
                time.sleep(_POLL_S)
            yield url
        finally:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=2.0) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False

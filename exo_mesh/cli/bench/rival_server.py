"""`mlx_lm.server` beside us: the same model, the same client, the same machine."""

from __future__ import annotations

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

from exo_mesh.cli.local_mesh import free_port
from exo_mesh.errors import DeadlineError, EngineError

START_DEADLINE_S = 120.0
_POLL_S = 0.2


def why_not() -> str:
    """Why there is no mlx_lm.server here; "" if there is one."""
    if importlib.util.find_spec("mlx_lm") is None:
        return "mlx-lm is not installed here: pip install mlx-lm"
    return ""


@contextlib.contextmanager
def mlx_server(model_dir: Path) -> Iterator[str]:
    """Its address, once it answers; it ends with the block. Raises EngineError or DeadlineError."""
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

"""Runs llama.cpp's own HTTP server, from the package `xllamacpp`: `python -m tools.llama_server FILE PORT`."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from exo_mesh.cli.client.local_mesh import free_port
from exo_mesh.errors import EngineError


def serve(
    model: Path, port: int, slots: int, key: str, context: int, *, flash: bool = True, threads: int | None = 1
) -> None:
    """Serve a GGUF file until the process ends.

    slots: answers at once, of `context` positions each. flash: with flash attention where it is the server's own
    choice. threads: None leaves the number to the server.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = context * slots
    params.use_jinja = True
    if not flash:
        params.flash_attn_type = 0
    params.endpoint_slots = True
    if threads is not None:
        params.cpuparams.n_threads = threads
    if key:
        params.api_keys = [key]
    server = xllamacpp.Server(params)
    print(f"ready at {server.listening_address}", flush=True)
    threading.Event().wait()


@contextlib.contextmanager
def llama_server(model: Path, slots: int, context: int, threads: int | None) -> Iterator[str]:
    """Starts the server in a process; yields its URL once it listens, and ends it afterwards. Raises EngineError."""
    command = [sys.executable, "-m", "tools.llama_server", str(model), str(port := free_port())]
    command += ["--slots", str(slots), "--context", str(context), *(["--threads", str(threads)] if threads else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        if not any(line.startswith("ready") for line in process.stdout):
            raise EngineError(f"llama-server ended with exit code {process.wait()}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    serve(args.model, args.port, args.slots, "", args.context, threads=args.threads)


if __name__ == "__main__":
    main()

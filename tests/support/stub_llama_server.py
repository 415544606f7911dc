"""A program with the command line of llama-server that serves no model; `write_stub` makes it executable.

The first word in its GGUF file says what it does: "ok", "broken" (ends while it loads), "stubborn" (ignores SIGTERM),
"slow" (never gets ready).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write_stub(path: Path) -> Path:
    """Write a script that runs this module, with any arguments."""
    path.write_text(
        f"#!{sys.executable}\n"
        f"import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.support.stub_llama_server import main\n"
        f"main()\n"
    )
    path.chmod(0o755)
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--host", "--port", "--model", "--ctx-size", "--parallel", "--device", "--spec-type", "--model-draft"):
        parser.add_argument(flag)
    parser.add_argument("--jinja", action="store_true")
    args = parser.parse_args()
    manner = Path(args.model).read_text().split()[0]
    print("build: stub", *sys.argv[1:], file=sys.stderr, flush=True)
    if manner == "broken":
        sys.exit(f"error loading model: {args.model} has no tensors")
    if manner == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asyncio.run(_serve(args.host, int(args.port), Path(args.model).name, is_slow=manner == "slow"))


async def _serve(host: str, port: int, model: str, *, is_slow: bool) -> None:
    from aiohttp import web

    from tests.support.fake_openai import FakeModelServer

    @web.middleware
    async def guard(request: web.Request, handler: web.Handler) -> web.StreamResponse:
        if (
            request.path != "/health"
            and request.headers.get("Authorization") != f"Bearer {os.environ['LLAMA_API_KEY']}"
        ):
            return web.json_response({"error": {"message": "Invalid API Key", "code": 401}}, status=401)
        if is_slow:
            return web.json_response({"error": {"code": 503, "message": "Loading model"}}, status=503)
        return await handler(request)

    app = FakeModelServer("llama-server", models=(model,)).app()
    app.middlewares.insert(0, guard)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    await asyncio.Event().wait()

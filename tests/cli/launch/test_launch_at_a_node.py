"""`exo-mesh launch` at a real node of a closed mesh, on the same machine: the local token makes the key of the run."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.launch.test_launch import machine
from tests.support.peers import MODEL, mesh

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]
SECRET = "0f5c8bb0a1f3fd0c0a6b8a1d3f0e4a77" * 2


async def test_the_local_token_makes_a_key_for_the_run_and_revokes_it(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    machine(tmp_path)
    with mesh(tmp_path, [["--secret-file", str(secret)]], engine="numpy") as (peer,):
        home = Path(peer.ready["home"])
        peer.place(context_limit=2048)
        code, errors, report = await launched(tmp_path, "--api-url", peer.url, "--home", str(home))
        assert (code, report["status"]) == (0, 200), errors
        assert f"uses {MODEL} at {peer.url} (2048 tokens of context)" in errors
        assert peer.api.get("/v1/keys")["data"] == [] and not list((home / "launch").iterdir())


async def test_without_a_node_one_is_started_for_the_run_and_stopped(tmp_path: Path) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 52415)) == 0:
            pytest.skip("a node runs on this machine")
    machine(tmp_path)
    own = {"DISCOVERY": "none", "ENGINE": "numpy", "API_PORT": "0", "GRPC_PORT": "0", "HOST": "127.0.0.1"}
    code, errors, report = await launched(
        tmp_path, "--model", MODEL, **{f"EXO_MESH_{name}": text for name, text in own.items()}
    )
    assert (code, report["status"]) == (0, 200), errors
    assert "starting one for this run" in errors
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or [])]


async def launched(root: Path, *words: str, **more: str) -> tuple[int | None, str, dict[str, object]]:
    """Launch a fake agent once: (exit code, standard error, its report)."""
    report = root / "report.json"
    environ = {"PATH": f"{root / 'bin'}:{os.environ['PATH']}", "REPORT": str(report), "HOME": str(root)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "exo_mesh.cli.main", "launch", "opencode", *words, "--", "Hello"),
        env={**environ, **more, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    return process.returncode, errors.decode(), json.loads(report.read_text()) if report.exists() else {"status": 0}

"""A machine without any heavy library: exo-mesh from its wheel with what it requires, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.installs import bare_environment
from tests.support.peers import mesh, text_of
from tests.support.processes import clean_environ

HEAVY = ("mlx", "mlx_lm", "torch", "transformers", "safetensors")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its Python; nodes that are started meanwhile run on it, and see neither this tree nor this environment."""
    found = bare_environment(tmp_path_factory.mktemp("bare"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(found))
        patch.setenv("PYTHONSAFEPATH", "1")
        patch.delenv("PYTHONPATH", raising=False)
        patch.delenv("VIRTUAL_ENV", raising=False)
        yield found


def run(python: Path, home: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-m", "exo_mesh.cli.main", *argv],
        check=False, capture_output=True, text=True, timeout=60, env=clean_environ(home), cwd=home,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engines(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What `exo-mesh engines --json` says, by name."""
    listed = json.loads(run(python, tmp_path_factory.mktemp("home"), "engines", "--json").stdout)
    return {engine["name"]: engine for engine in listed}


def test_it_is_really_bare(python: Path, tmp_path: Path) -> None:
    code = f"import importlib.util as u, exo_mesh; print([n for n in {HEAVY} if u.find_spec(n)], exo_mesh.__file__)"
    command = [str(python), "-c", code]
    said = subprocess.run(
        command, check=True, capture_output=True, text=True, env=clean_environ(tmp_path), cwd=tmp_path
    )
    assert said.stdout.startswith("[] ")
    assert str(python.parents[1]) in said.stdout


def test_each_engine_says_whether_it_runs_here_why_not_and_what_helps(engines: dict[str, dict[str, Any]]) -> None:
    assert engines["dummy"]["available"]
    for name in {"mlx", "torch"} & engines.keys():
        assert not engines[name]["available"]
        assert "not installed" in engines[name]["reason"]
        assert "pip install" in engines[name]["remedy"]
    assert not [name for name, engine in engines.items() if "does not import" in engine["reason"]]


def test_auto_takes_the_best_that_is_there(engines: dict[str, dict[str, Any]]) -> None:
    chosen = [name for name, engine in engines.items() if engine["chosen"]]
    assert chosen == (["numpy"] if "numpy" in engines else [])


def test_the_table_is_for_people(python: Path, tmp_path: Path) -> None:
    said = run(python, tmp_path, "engines")
    assert said.returncode == 0
    assert "pip install" in said.stdout
    assert "MEMORY" in said.stdout and "cpu" in said.stdout


@pytest.mark.extended
def test_an_engine_that_cannot_run_here_is_refused_by_a_node_with_what_helps(python: Path, tmp_path: Path) -> None:
    said = run(python, tmp_path, "serve", "--engine", "nope", "--discovery", "none", "--api-port", "0")
    assert said.returncode == 2
    assert "dummy" in said.stderr, "it lists what there is"


OLD_GLIBC = """
import platform, sys
platform.libc_ver = lambda *_, **__: ("glibc", "2.31")
from exo_mesh.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_a_node_on_an_old_glibc_says_at_its_start_that_mlx_has_no_wheel(python: Path, tmp_path: Path) -> None:
    flags = ["--host", "127.0.0.1", "--grpc-port", "0", "--api-port", "0", "--discovery", "none"]
    with subprocess.Popen(
        [str(python), "-c", OLD_GLIBC, "serve", "--log-format", "json", *flags],
        stdout=subprocess.PIPE, text=True, env=clean_environ(tmp_path), cwd=tmp_path,
    ) as node:  # fmt: skip
        assert node.stdout is not None
        ready = next(json.loads(line) for line in node.stdout if '"event": "ready"' in line)
        node.terminate()
    assert ready["engine"] == "numpy"
    assert [
        note for note in ready["notes"] if note.startswith("MLX has no wheel for glibc 2.31 (it needs 2.35 or newer)")
    ]


@pytest.mark.extended
def test_its_nodes_join_and_serve_the_dummy(python: Path, tmp_path: Path) -> None:
    with mesh(tmp_path, [["--min-peers", "2"]] * 2, engine="dummy") as peers:
        instance = peers[0].place()
        assert {stage["engine"] for stage in instance["stages"]} == {"dummy"}
        assert len({stage["peer"] for stage in instance["stages"]}) == 2
        assert len(text_of(peers[1].chat("hello", max_tokens=8))) == 8
        shown = peers[0].api.get("/v1/topology")
        assert json.dumps(shown).count('"why": "') == 2, "each peer says what it computes on, and why so much is usable"
        executables = {os.path.realpath(Path(f"/proc/{peer.child.pid}/exe")) for peer in peers}
        assert executables == {os.path.realpath(python)}


@pytest.mark.extended
def test_its_nodes_serve_a_real_model_with_numpy(
    python: Path, engines: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    if "numpy" not in engines:
        pytest.skip("this build has no NumPy engine")
    with mesh(tmp_path, [["--min-peers", "2"]] * 2, engine="auto") as peers:
        instance = peers[0].place()
        assert {stage["engine"] for stage in instance["stages"]} == {"numpy"}
        assert "8, 9, 10" in text_of(peers[1].chat("Count from 7 to 12.", max_tokens=40))

"""The Makefile and the scripts beside it: clean shell, help, and dry runs that change nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import clean_environ

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for path in (ROOT / "scripts").glob("*.sh") if path.name not in ("common.sh", "install.sh"))
TARGETS = (
    "setup", "verify", "rdma-test", "server", "server-stop", "kill-all", "bench", "memory", "health", "download",
    "test", "lint", "proto", "monitoring-up",
)  # fmt: skip
"""What `make` must have, besides others."""

DRY_RUNS = {
    "bootstrap_node.sh": ["host-a", "host-b"],
    "cluster_info.sh": ["host-a", "http://127.0.0.1:1"],
    "rdma_test.sh": ["--ranks", "2"],
    "run_server.sh": ["--model", "exo-mesh-demo", "--", "--engine", "numpy"],
    "setup.sh": ["--extras", "mlx"],
    "stop_server.sh": [],
    "sync_nodes.sh": ["host-a", "host-b"],
    "tps_bench.sh": ["http://127.0.0.1:1", "some-model"],
    "verify_cluster.sh": ["--rdma", "host-a", "http://127.0.0.1:1"],
}


def called(
    script: str | Path, *argv: str, home: Path, ssh: str = "false", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with the exo-mesh of this checkout and interpreter. ssh: by default reaching any host fails."""
    tool = home / "exo-mesh-here"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m exo_mesh.cli.main "$@"\n')
    tool.chmod(0o700)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "engines")])
    environ = {
        **clean_environ(home / "node"), "EXO_MESH": str(tool), "EXO_MESH_SSH": ssh, "PATH": path, "PYTHONPATH": paths,
        **variables,
    }  # fmt: skip
    command = [str(ROOT / "scripts" / script), *argv]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120, check=False)


@pytest.mark.extended
def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck here: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", *SCRIPTS], check=False, cwd=ROOT, capture_output=True, text=True)
    assert not done.stdout + done.stderr


def test_every_script_stops_at_the_first_error_has_a_dry_run_and_stands_in_the_docs() -> None:
    assert {script.name for script in SCRIPTS} == set(DRY_RUNS)
    page = (ROOT / "docs" / "tasks" / "scripts.md").read_text()
    for script in SCRIPTS:
        text = script.read_text()
        assert "\nset -euo pipefail\n" in text and "--dry-run" in text and os.access(script, os.X_OK), script.name
        assert f"`scripts/{script.name}`" in page


def planned(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "-n", *argv], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", TARGETS)
def test_every_make_target_is_one_that_make_can_plan(target: str) -> None:
    if shutil.which("make") is None:
        pytest.skip("no make here")
    done = planned(target, "MODEL=some/model")
    assert done.returncode == 0 and done.stdout, done.stderr
    assert f"`make {target}" in (ROOT / "docs" / "tasks" / "scripts.md").read_text()


def test_make_without_a_target_lists_them_and_download_wants_a_model() -> None:
    if shutil.which("make") is None:
        pytest.skip("no make here")
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {line.split()[0] for line in listed.splitlines()} >= set(TARGETS)
    refused = planned("download")
    assert refused.returncode and "make download MODEL=org/name" in refused.stderr


def test_the_scripts_name_only_verbs_and_flags_that_exist() -> None:
    from exo_mesh.cli.main import VERBS

    texts = [script.read_text() for script in SCRIPTS]
    texts.append((ROOT / "Makefile").read_text().replace("$(EXO_MESH)", "exo_mesh"))
    named = {verb for text in texts for verb in re.findall(r"(?:run |! |^\t|\()exo_mesh ([a-z]+)", text, re.MULTILINE)}
    assert len(named) > 6 and named <= VERBS.keys()


@pytest.mark.extended
@pytest.mark.parametrize("script", DRY_RUNS)
def test_a_dry_run_prints_what_would_be_done_and_reaches_nobody(script: str, tmp_path: Path) -> None:
    done = called(script, "--dry-run", *DRY_RUNS[script], home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("+ ") or script == "stop_server.sh", done.stdout
    assert not (tmp_path / "node").exists()


@pytest.mark.extended
@pytest.mark.parametrize("script", sorted({*DRY_RUNS} - {"tps_bench.sh"}))
def test_a_wrong_flag_is_refused_and_help_tells_the_usage(script: str, tmp_path: Path) -> None:
    assert called(script, "--help", home=tmp_path).stdout.splitlines()[2].startswith(f"usage: scripts/{script} ")
    assert called(script, "--colour", home=tmp_path).returncode == 1

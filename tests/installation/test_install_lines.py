"""Runs the pip, uv and pipx lines of docs/start/installation.md in their own environments, from the built wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.installs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def tool(name: str) -> str:
    path = os.pathsep.join([os.environ.get("PACKAGING_TOOLS", ""), os.environ["PATH"]])
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"{name} is not installed; PACKAGING_TOOLS names a folder with it")
    return found


def environ(home: Path) -> dict[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("EXO_MESH_", "PYTHON", "VIRTUAL_ENV", "XDG_"))
    }
    return kept | {"HOME": str(home), "COLUMNS": "100"}


def said(command: list[str], env: Mapping[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=env, cwd=env["HOME"])
    if "No matching distribution" in done.stderr or "onnection" in done.stderr:
        pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.parametrize("way", ["pip", "uv", "pipx"])
def test_the_line_installs_a_command_that_answers(way: str, built_wheel: Path, tmp_path: Path) -> None:
    env = environ(tmp_path)
    command = tmp_path / ".local/bin/exo-mesh"
    if way == "pip":
        said([sys.executable, "-m", "venv", "venv"], env)
        said(["venv/bin/pip", "install", f"{built_wheel}[mlx]"], env | {"PATH": f"venv/bin:{env['PATH']}"})
        command = tmp_path / "venv/bin/exo-mesh"
    elif way == "uv":
        said([tool("uv"), "tool", "install", "--python", sys.executable, f"{built_wheel}[mlx]"], env)
    else:
        said([tool("pipx"), "install", "--python", sys.executable, f"{built_wheel}[mlx]"], env)
    assert said([str(command), "--version"], env).startswith("exo-mesh 0.")
    assert ", ".join(map(str, range(7, 21))) in said([str(command), "demo", "--once"], env)


def test_the_oldest_versions_that_the_package_allows_work(built_wheel: Path, tmp_path: Path) -> None:
    """The floors of pyproject.toml are no guesses."""
    env = environ(tmp_path)
    uv = tool("uv")
    said([uv, "venv", "--python", sys.executable, "venv"], env)
    install = [uv, "pip", "install", "--python", "venv/bin/python"]
    said([*install, "--resolution", "lowest-direct", "-r", str(ROOT / "pyproject.toml"), "--extra", "mlx"], env)
    said([*install, "--no-deps", str(built_wheel)], env)
    shown = said(["venv/bin/exo-mesh", "--version"], env)
    assert "grpcio 1.76" in shown and "mlx 0.32" in shown
    assert ", ".join(map(str, range(7, 21))) in said(["venv/bin/exo-mesh", "demo", "--once"], env)


MACHINES = [
    ("x86_64-manylinux_2_31", "", True),
    ("x86_64-manylinux_2_31", "mlx", False),
    ("x86_64-manylinux_2_35", "mlx", True),
    ("x86_64-manylinux_2_31", "torch", True),
    ("aarch64-manylinux_2_31", "", True),
    ("aarch64-manylinux_2_35", "mlx", True),
    ("x86_64-manylinux_2_28", "", False),
    ("x86_64-unknown-linux-musl", "", False),
    ("aarch64-apple-darwin", "mlx", True),
    ("x86_64-apple-darwin", "torch", False),
]
"""Systems of the table in docs/start/installation.md, and whether everything has a wheel there."""


@pytest.mark.parametrize(("platform", "extra", "has_wheels"), MACHINES)
def test_where_everything_has_a_wheel(
    platform: str, extra: str, has_wheels: bool, built_wheel: Path, tmp_path: Path
) -> None:
    """What the package index offers for machines that we do not have."""
    requirements = tmp_path / "requirements.in"
    requirements.write_text(f"exo-mesh{f'[{extra}]' if extra else ''} @ {built_wheel.as_uri()}\n")
    resolve = [tool("uv"), "pip", "compile", "--quiet", "--python-version", "3.12", "--only-binary", ":all:"]
    done = subprocess.run(
        [*resolve, "--python-platform", platform, str(requirements)],
        capture_output=True, text=True, timeout=300, check=False,
        env=environ(tmp_path) | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}, cwd=ROOT,
    )  # fmt: skip
    if "Failed to fetch" in done.stderr:
        pytest.skip("no package index can be reached")
    assert (done.returncode == 0) is has_wheels, done.stderr

"""Wheels built and installed as a user would, without a network: with the setuptools and pip of this environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
_BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def build_wheel(source: Path, scratch: Path) -> Path:
    """The wheel of a project, built from a copy of it under `scratch`: nothing is left in its own tree."""
    tree = scratch / source.name
    shutil.copytree(source, tree, ignore=_IGNORED)
    return build_in_place(tree, scratch)


def build_in_place(tree: Path, target: Path) -> Path:
    """The wheel of the project in `tree`, written to `target`."""
    built = subprocess.run(
        [sys.executable, "-c", _BUILD, str(target)], cwd=tree, capture_output=True, text=True, timeout=120, check=False
    )
    assert built.returncode == 0, built.stderr[-2000:]
    return target / built.stdout.split()[-1]


def install(wheel: Path, site: Path) -> Path:
    """Install a wheel, and nothing that it needs, into a directory for sys.path; answers that directory."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "--root-user-action=ignore", "--target", str(site), str(wheel)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return site

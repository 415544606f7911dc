"""Copies of this checkout, as a release is built from: the files that git knows, and none that it ignores."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.installs import ROOT

_BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def tracked_files() -> list[str]:
    """What git tracks here, with new files that it does not ignore; the test is skipped outside a checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"this is no git checkout: {listed.stderr.strip()}")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def copy_checkout(target: Path) -> Path:
    for name in tracked_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)
    return target


def build(kind: str, tree: Path, target: Path, *, umask: int = 0o022, environ: dict[str, str] | None = None) -> Path:
    """Build the "wheel" or the "sdist" of `tree` with the setuptools of this environment; answers the file."""
    target.mkdir(parents=True, exist_ok=True)
    built = subprocess.run(
        [sys.executable, "-c", _BUILD, f"build_{kind}", str(target)],
        cwd=tree, capture_output=True, text=True, timeout=300, check=False, umask=umask, env=environ,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-2000:]
    return target / built.stdout.split()[-1]

"""Wheels built and installed as a user would, without a network: with the setuptools and pip of this environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

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


def own_wheel(scratch: Path) -> Path:
    """The wheel of exo-mesh itself, built from a copy of what it needs."""
    tree = scratch / "tree"
    for name in ("exo_mesh", "engines"):
        shutil.copytree(ROOT / name, tree / name, ignore=_IGNORED)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    return build_in_place(tree, scratch)


def bare_environment(scratch: Path) -> Path:
    """A virtual environment with exo-mesh, installed from its wheel, and with what it requires, linked from here.

    So it has no tensor library but NumPy. Answers its Python.
    """
    home = scratch / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=120)
    python = home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, check=True, capture_output=True, text=True, timeout=60).stdout.strip())
    wheel = own_wheel(scratch)
    install(wheel, site)
    for name in _required(next(iter(metadata.distributions(name="exo-mesh", path=[str(site)])))):
        _link(metadata.distribution(name), site)
    return python


def _required(root: metadata.Distribution) -> set[str]:
    """Names of all distributions that one requires without extras, and those that these require."""
    found: set[str] = set()
    waiting = [root]
    while waiting:
        for text in waiting.pop().requires or ():
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            if requirement.name not in found:
                found.add(requirement.name)
                waiting.append(metadata.distribution(requirement.name))
    return found


def _link(distribution: metadata.Distribution, site: Path) -> None:
    """Make a distribution that is installed here importable from another site directory."""
    tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        link = site / top
        if not link.exists():
            link.symlink_to(Path(str(distribution.locate_file(top))))

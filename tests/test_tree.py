"""The tracked tree has the shape that docs/how-it-works/architecture.md describes, and nothing stands outside it."""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]

FOLDERS = {
    "exo_mesh", "engines", "protos", "monitoring", "nginx", "systemd", "scripts", "hostfiles", "examples", "docs",
    "tests", "tools",
}  # fmt: skip
"""A folder outside this list needs a line here and a reason."""
FILES = {
    "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CONTRIBUTING.md", "LICENSE", "Dockerfile", "Makefile",
    "compose.yaml",
}  # fmt: skip
"""Besides these only hidden files and folders, which configure the tools that work on the tree."""

WINGS = {
    "cli", "api", "node", "rings", "models", "mesh", "machine", "engine", "text", "wire", "settings", "weights",
    "security", "domain", "base",
}  # fmt: skip
"""The folders of exo_mesh, from the command line down; .importlinter has them in the same order."""
MODULES = {"__init__.py", "errors.py", "py.typed"}


@pytest.fixture(scope="module")
def tracked() -> list[PurePosixPath]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"this is no git checkout: {listed.stderr.strip()}")
    return [PurePosixPath(name) for name in listed.stdout.split("\0") if name]


def test_no_folder_or_file_stands_outside_the_tree(tracked: list[PurePosixPath]) -> None:
    visible = [path for path in tracked if not path.parts[0].startswith(".")]
    assert {path.parts[0] for path in visible if len(path.parts) > 1} <= FOLDERS
    assert {path.parts[0] for path in visible if len(path.parts) == 1} == FILES


def test_exo_mesh_has_exactly_its_wings(tracked: list[PurePosixPath]) -> None:
    inside = [path.relative_to("exo_mesh") for path in tracked if path.is_relative_to("exo_mesh")]
    assert {path.parts[0] for path in inside if len(path.parts) > 1} == WINGS
    assert {path.name for path in inside if len(path.parts) == 1} == MODULES


def test_engines_holds_packages_only(tracked: list[PurePosixPath]) -> None:
    inside = [path.relative_to("engines") for path in tracked if path.is_relative_to("engines")]
    assert all(len(path.parts) > 1 and path.parts[0].startswith("exo_mesh_") for path in inside), inside

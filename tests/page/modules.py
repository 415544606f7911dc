"""Calls functions of the page's modules in Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.web.assets import FOLDER

NODE = shutil.which("node")
HERE = Path(__file__).parent
needs_node = pytest.mark.skipif(NODE is None, reason="calling the page's modules needs node")

Call = tuple[str, str, Sequence[Any]]
"""A module of `app`, the name of one of its functions, and the arguments."""


def copy_page(folder: Path, *scripts: str) -> None:
    """Copy the page, and scripts of this folder beside it, so that Node reads its files as modules."""
    for part in ("app", "vendor", "strings"):
        shutil.copytree(FOLDER / part, folder / part)
    for script in scripts:
        shutil.copy(HERE / script, folder)
    (folder / "package.json").write_text('{"type": "module"}')


def run_script(folder: Path, script: str, given: Any, *arguments: str) -> Any:
    """The JSON that a script in the copied page writes."""
    assert NODE is not None
    done = subprocess.run(
        [NODE, script, *arguments],
        cwd=folder,
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def call_page(folder: Path, calls: Sequence[Call], language: str = "en") -> list[Any]:
    """The results of the calls, by one process of Node in an empty folder."""
    copy_page(folder, "call_module.mjs")
    found: list[Any] = run_script(folder, "call_module.mjs", calls, language)
    return found

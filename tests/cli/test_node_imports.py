"""What the start of a node imports, and what it leaves out."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from exo_mesh.base.gc_pauses import gc_pauses

ALLOWED = {
    *("exo_mesh", "aiohappyeyeballs", "aiohttp", "aiosignal", "attr", "frozenlist", "google", "grpc", "idna"),
    *("msgspec", "multidict", "propcache", "psutil", "typing_extensions", "yarl"),
}
"""Packages that the start of a node may import, besides the standard library. A new one costs each node memory and
start time: import it where it is first used, or add it here with the reason in the commit."""

BY_INSTALLATIONS = (
    "_cython_",
    "cython_runtime",
    "__editable__",
    "_distutils_hack",
    "grpc_tools",
    "__main__",
    "_virtualenv",
)
"""Beginnings of further names: support of compiled modules, installations for development."""


def after_imports(code: str, *arguments: str) -> str:
    """The output of this code in a process that has imported what a node needs."""
    imports = "import exo_mesh.cli.verbs.serve as s\nwith s.gc_pauses(): import exo_mesh.cli.wiring\n"
    command = [sys.executable, "-c", imports + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_node_imports_only_the_packages_of_the_list() -> None:
    found = after_imports("import sys; print(*{n.partition('.')[0] for n in sys.modules} - sys.stdlib_module_names)")
    unlisted = {name for name in found.split() if not name.startswith(BY_INSTALLATIONS)} - ALLOWED
    assert unlisted == set()
    assert {"exo_mesh", "aiohttp", "grpc"} <= set(found.split())


STARTED = """
import asyncio, sys
from exo_mesh.settings.loading import load_settings

async def start(home):
    flags = {"home": home, "models_dirs": home, "api_port": "0", "discovery": "none", "engine": "dummy"}
    settings = load_settings({name: [text] for name, text in flags.items()}, {})
    node = exo_mesh.cli.wiring.RunningNode(settings)
    await node.start()
    print("Modules:", *(name for name in sys.modules if name.startswith("exo_mesh")))
    await node.stop()

asyncio.run(start(sys.argv[1]))
"""

MOST_MODULES = 461
"""Most modules of ours that a node has imported when it is ready. Each takes 0.3 ms of the start and some 30 kB; a
handler, a page or a child process that few nodes use is imported at its first use."""


def test_a_node_that_is_ready_has_imported_few_modules(tmp_path: Path) -> None:
    line = next(line for line in after_imports(STARTED, str(tmp_path)).splitlines() if line.startswith("Modules:"))
    names = line.split()[1:]
    assert 100 < len(names) <= MOST_MODULES
    assert not {name for name in names if name.startswith(("exo_mesh.api.openai", "exo_mesh.api.webtools.handlers"))}


MOST_OF_A_RUNNER = 171
"""Most modules of ours that a runner imports before its engine. It handles token ids, so it knows no text."""


def test_a_runner_imports_few_modules_and_none_of_texts() -> None:
    code = "import sys, exo_mesh.rings.runner.process; print(*(name for name in sys.modules if 'exo_mesh' in name))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    names = found.stdout.split()
    assert 100 < len(names) <= MOST_OF_A_RUNNER
    assert not {name for name in names if name.startswith(("exo_mesh.text.tokenizer", "exo_mesh.text.output"))}


def test_after_the_imports_collections_are_on_and_skip_what_was_imported() -> None:
    assert after_imports("import gc; print(gc.isenabled(), gc.get_freeze_count() > 10_000)").split() == ["True", "True"]


def test_collections_are_on_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="no library"), gc_pauses():
        assert not gc.isenabled()
        raise ValueError("no library")
    assert gc.isenabled()


def test_a_node_collects_among_all_objects_by_itself_only_after_many_young_collections() -> None:
    code = "import gc; from exo_mesh.base.gc_pauses import *; before = gc.get_threshold(); rare_full_collections()\n"
    assert after_imports(f"{code}print(*before); print(*gc.get_threshold())").split() == [
        "700",
        "10",
        "10",
        "700",
        "10",
        "100",
    ]

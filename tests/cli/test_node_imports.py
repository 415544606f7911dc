"""What the start of a node imports, and what it leaves out."""

from __future__ import annotations

import gc
import subprocess
import sys

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


def after_imports(code: str) -> str:
    """The output of this code in a process that has imported what a node needs."""
    imports = "import exo_mesh.cli.verbs.serve as s\nwith s.gc_pauses(): import exo_mesh.cli.wiring\n"
    command = [sys.executable, "-c", imports + code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_node_imports_only_the_packages_of_the_list() -> None:
    found = after_imports("import sys; print(*{n.partition('.')[0] for n in sys.modules} - sys.stdlib_module_names)")
    unlisted = {name for name in found.split() if not name.startswith(BY_INSTALLATIONS)} - ALLOWED
    assert unlisted == set()
    assert {"exo_mesh", "aiohttp", "grpc"} <= set(found.split())


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

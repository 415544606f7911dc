"""A module that says in its docstring that it is pure reaches no clock, socket, thread or event loop by its imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROMISE = re.compile(r"\bPure[.:]|\bPure (?:values|functions)\b|\bpure functions\b|; pure\.|\b[Nn]o clock\b|: pure\b")
"""How the docstring of a module, of a class or of a package says so. A package speaks for all that is in it."""

FORBIDDEN = {"asyncio", "socket", "time", "threading", "subprocess", "grpc", "aiohttp"}


def promising() -> set[str]:
    """Names of the modules and packages that promise it."""
    found = set()
    for base in (ROOT, ROOT / "engines"):
        for path in base.glob("exo_mesh*/**/*.py"):
            text = path.read_text()
            if PROMISE.search(text) and "proto" not in path.parts and _promises(ast.parse(text)):
                found.add(".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"))
    return found


def _promises(tree: ast.Module) -> bool:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return any(PROMISE.search(ast.get_docstring(node) or "") for node in (tree, *classes))


def test_what_promises_to_be_pure_is_pure() -> None:
    grimp = pytest.importorskip("grimp", reason="comes with import-linter")
    packages = sorted({name.partition(".")[0] for name in promising()})
    graph = grimp.build_graph(*packages, include_external_packages=True, cache_dir=None)
    pure = {one for name in promising() for one in ({name} | graph.find_descendants(name))}
    assert len(pure) > 100 and "exo_mesh.domain.placement" in pure, "the pattern finds what it is for"
    broken = {
        one: graph.find_shortest_chain(one, wanted)
        for wanted in FORBIDDEN & graph.modules
        for one in pure & graph.find_downstream_modules(wanted)
    }
    assert broken == {}, "it says that it is pure"

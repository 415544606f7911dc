"""Rules of the tree that no linter has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def uses_of_wait_for(tree: ast.AST) -> Iterator[int]:
    """Lines that use asyncio.wait_for, under whatever name the module was imported."""
    modules = {"asyncio", "asyncio.tasks"}
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in modules
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            yield from (node.lineno for alias in node.names if alias.name == "wait_for")
        elif isinstance(node, ast.Attribute) and node.attr == "wait_for" and ast.unparse(node.value) in names:
            yield node.lineno


def test_nothing_waits_by_wait_for_which_may_swallow_a_cancellation() -> None:
    """In Python 3.11 a task that is cancelled just when what it waits for ends goes on as if nothing had been said;
    `async with asyncio.timeout(…)` does not."""
    sources = {
        path.relative_to(ROOT): path.read_text()
        for folder in ("exo_mesh", "engines")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    found = [
        f"{path}:{line}"
        for path, text in sources.items()
        if "wait_for" in text
        for line in uses_of_wait_for(ast.parse(text))
    ]
    assert not found, "use asyncio.timeout"


@pytest.mark.parametrize(
    "source",
    ["import asyncio\nasyncio.wait_for(x, 1)", "import asyncio as a\na.wait_for(x, 1)",
     "from asyncio import wait_for as w"],
)  # fmt: skip
def test_the_rule_sees_each_way_to_break_it(source: str) -> None:
    assert list(uses_of_wait_for(ast.parse(source)))


def test_other_things_of_that_name_are_allowed() -> None:
    assert not list(uses_of_wait_for(ast.parse("import asyncio\nself.wait_for(x)\nasyncio.wait({x})")))

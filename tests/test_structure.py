"""Rules of the code's structure that the import contracts do not have."""

from __future__ import annotations

import ast
import configparser
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tools.structure import constructions, packages

ROOT = Path(__file__).resolve().parents[1]

CLASS = re.compile(r"^[ \t]*class[ \t]+(\w+)[ \t]*[(:]", re.MULTILINE)
PROMISE = re.compile(r"\bPure[.:]|\bpure functions\b|; pure\.|\b[Nn]o clock\b|: pure\b")
"""How a docstring says that its module or class knows no clock, socket or event loop."""


def product() -> list[Path]:
    """Every module that a user gets, but generated ones."""
    found = [path for folder in ("exo_mesh", "engines") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "proto" not in path.parts]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "engines" else parts
    return ".".join(parts).removesuffix(".__init__")


def promises_to_be_pure(tree: ast.Module) -> bool:
    documented: list[ast.Module | ast.ClassDef] = [
        tree,
        *(node for node in tree.body if isinstance(node, ast.ClassDef)),
    ]
    return any(PROMISE.search(ast.get_docstring(node) or "") for node in documented)


def test_a_module_that_says_it_is_pure_is_checked_for_it() -> None:
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    checked = contracts["importlinter:contract:pure"]["source_modules"].split()
    texts = {path: path.read_text() for path in product()}
    trees = {path: ast.parse(text) for path, text in texts.items() if PROMISE.search(text)}
    promised = [module_name(path) for path, tree in trees.items() if promises_to_be_pure(tree)]
    assert len(promised) > 15, "the pattern finds what it is for"
    unchecked = [name for name in promised if not any(f"{name}.".startswith(f"{known}.") for known in checked)]
    assert not unchecked, "list them in the contract 'pure' of .importlinter"


def test_a_class_name_stands_for_one_class() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in product():
        for name in CLASS.findall(path.read_text()):
            places[name].append(str(path.relative_to(ROOT)))
    assert len(places) > 200, "the pattern finds what it is for"
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_package_is_too_large_to_find_ones_way_in() -> None:
    sizes = {package.name: package for package in packages()}
    assert len(sizes) > 20
    most = {
        "cli": 9000,
        "domain": 6500,
        "text": 8000,
        "models": 5900,
    }  # folders for each larger verb, and for each larger subject
    assert {name: size.lines for name, size in sizes.items() if size.lines > most.get(name, 5500)} == {}, "lines"
    widest = {"cli": 38, "domain": 38, "api.core": 38}  # a module for each verb, each decision, each step
    wide = {name: size.widest for name, size in sizes.items() if size.widest > widest.get(name, 36)}
    assert wide == {}, "modules in one folder"
    assert sizes["node"].lines <= 2700, "node wires, starts, stops and answers; work belongs to the other packages"


def test_a_node_is_made_of_parts() -> None:
    made = constructions(ROOT / "exo_mesh" / "node" / "parts.py", "NodeParts")
    assert 10 < len(made) <= 19, "a new part belongs into the factory of its package, parts.py"
    assert "NodeParts" in constructions(ROOT / "exo_mesh" / "node" / "node.py", "Node")


def test_a_module_has_one_subject_and_fewer_than_500_lines() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in product()}
    assert {name: lines for name, lines in lengths.items() if lines >= 500} == {}, "split it by subject"


@pytest.mark.extended
def test_a_function_fits_on_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in product()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 60
    ]
    assert long == []

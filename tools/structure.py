"""Prints the size of each package, and the parts of a node: `python -m tools.structure`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SPLIT = ("api", "cli", "rings", "models", "mesh")
"""Wings whose folders are counted by themselves: dialects of the API, and the rooms of large wings."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package. modules, lines: of everything below it, without generated code. widest: most modules in one of its
    folders."""

    name: str
    modules: int
    lines: int
    widest: int


def packages(root: Path = ROOT) -> list[Package]:
    """Returns the packages of exo_mesh and the engines, the largest first."""
    folders = [path for path in (root / "exo_mesh").iterdir() if (path / "__init__.py").is_file()]
    folders += [path for path in (root / "engines").iterdir() if (path / "__init__.py").is_file()]
    sizes = [_measured(folder) for folder in folders if folder.name not in ("proto", *SPLIT)]
    parts = [part for name in SPLIT for part in _parts(root / "exo_mesh" / name)]
    return sorted([*sizes, *parts], key=lambda one: -one.lines)


def _parts(folder: Path) -> list[Package]:
    """Splits a package: what is directly in it, and each folder below."""
    below = [path for path in folder.iterdir() if (path / "__init__.py").is_file()]
    return [
        _measured(folder, without=below),
        *(replace(_measured(part), name=f"{folder.name}.{part.name}") for part in below),
    ]


def _measured(folder: Path, without: Sequence[Path] = ()) -> Package:
    files = [file for file in folder.rglob("*.py") if not any(file.is_relative_to(part) for part in without)]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    in_one_folder = [len(list(place.glob("*.py"))) for place in {file.parent for file in files}]
    return Package(folder.name, len(files), lines, max(in_one_folder))


def constructions(file: Path, class_name: str) -> list[str]:
    """Returns the classes, and factories `X.build`, that the constructor of a class and its `_new_*` helpers call."""
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ClassDef) or node.name != class_name:
            continue
        for function in node.body:
            if isinstance(function, ast.FunctionDef) and function.name.startswith(("__init__", "_new_")):
                calls = [
                    ast.unparse(call.func)
                    for call in ast.walk(ast.Module(function.body, []))
                    if isinstance(call, ast.Call)
                ]
                found += [call for call in calls if call.split(".")[0][:1].isupper()]
    return found


def main() -> None:
    for package in packages():
        size = f"{package.modules:4} modules {package.lines:6} lines"
        print(f"{package.name:20} {size}, at most {package.widest} modules in a folder")
    made = constructions(ROOT / "exo_mesh" / "node" / "node.py", "Node")
    print(f"\na node makes {len(made)} objects: {', '.join(made)}")


if __name__ == "__main__":
    main()

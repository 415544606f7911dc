"""What must be named in a second place is named there; each failure says in which file."""

from __future__ import annotations

import ast
import configparser
import re
import tomllib
from pathlib import Path

from exo_mesh.engine.registry import GROUP

ROOT = Path(__file__).resolve().parents[1]
ENGINES = {path.parent.name for path in (ROOT / "engines").glob("*/__init__.py")}


def entry_points() -> dict[str, str]:
    """{name of an engine: its package}, as pyproject.toml has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {name: path.partition(":")[0] for name, path in project["entry-points"][GROUP].items()}


def test_every_engine_has_an_entry_point() -> None:
    assert set(entry_points().values()) == ENGINES, f'pyproject.toml: [project.entry-points."{GROUP}"]'


def test_every_engine_is_in_each_list_of_engines_of_the_import_contracts() -> None:
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    lists = {
        f"[{section}] {option}": set(value.split())
        for section in contracts.sections()
        for option, value in contracts[section].items()
    }
    missing = {where: ENGINES - names for where, names in lists.items() if ENGINES & names and ENGINES - names}
    assert not missing, "add the engine to these lists of .importlinter"


def test_every_engine_has_a_row_in_the_documentation() -> None:
    table = (ROOT / "docs" / "reference" / "engines.md").read_text().partition("## Which one is chosen")[0]
    documented = set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE))
    assert documented == set(entry_points()), "docs/reference/engines.md, the first table"


def given_reasons(tree: ast.AST) -> set[str]:
    """The words that calls of PlacementError in a module give as `reason`."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    placement = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "PlacementError")
    values = (keyword.value for call in placement for keyword in call.keywords if keyword.arg == "reason")
    return {str(value.value) for value in values if isinstance(value, ast.Constant)}


def test_every_reason_of_a_refused_placement_is_documented() -> None:
    page = (ROOT / "docs" / "how-it-works" / "placement.md").read_text()
    refusals = page.partition("## Refusals")[2].partition("\n## ")[0]
    documented = {word for row in re.findall(r"^\| (`.*?) \|", refusals, re.M) for word in re.findall(r"`(\w+)`", row)}
    texts = [path.read_text() for path in (ROOT / "exo_mesh").rglob("*.py")]
    given = set().union(*(given_reasons(ast.parse(text)) for text in texts if "PlacementError(" in text))
    assert len(given) >= 5, "the pattern finds what it is for"
    assert given <= documented, 'docs/how-it-works/placement.md, the table below "Refusals"'

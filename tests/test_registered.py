"""What must be named in a second place is named there; each failure says in which file."""

from __future__ import annotations

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
    table = (ROOT / "docs" / "engines.md").read_text().partition("## Which one is chosen")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert documented == set(entry_points()), "docs/engines.md, the first table"

"""docs/reference/dependencies.md names every dependency of pyproject.toml, each with a reason."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "dependencies.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    """The package of each requirement, without extras, versions and markers."""
    found = (re.match(r"[\w.-]+", one) for one in requirements)
    return {match[0] for match in found if match}


def test_every_core_dependency_has_a_reason() -> None:
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| (.+?) \|$", PAGE.partition("## Extras")[0], re.MULTILINE))
    assert rows.keys() == names(PROJECT["dependencies"])
    assert all(len(reason.split()) >= 3 for reason in rows.values())


def test_every_dependency_of_an_extra_has_a_reason() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| `([\w.-]+)` \| (.+?) \|$", PAGE.partition("## Extras")[2], re.MULTILINE)
    extras = {extra: names(packages) for extra, packages in PROJECT["optional-dependencies"].items() if extra != "dev"}
    wanted = {(extra, package) for extra, packages in extras.items() for package in packages}
    assert {(extra, package) for extra, package, _ in rows} == wanted
    assert len(rows) == len(wanted)
    assert all(len(reason.split()) >= 3 for _, _, reason in rows)

"""The documents name what the code has."""

from __future__ import annotations

import re
from pathlib import Path

from exo_mesh import errors
from exo_mesh.api.errors import _RULES

ROOT = Path(__file__).resolve().parents[2]


def test_every_error_code_is_documented_with_its_status() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", page, re.MULTILINE))
    assert rows == {code: str(rule.status) for code, rule in _RULES.items()}, "docs/reference/errors.md, api/errors.py"
    codes = {cls.code for cls in vars(errors).values() if isinstance(cls, type)}
    assert codes <= rows.keys(), "give the code a status in api/errors.py and a row in docs/reference/errors.md"


def test_links_between_documents_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_readme_has_one_test_command_between_its_markers() -> None:
    marked = re.search(r"<!-- test-command -->\n```sh\n(.*)\n```\n<!-- end -->", (ROOT / "README.md").read_text())
    assert marked is not None
    assert marked[1] == 'pip install ".[mlx,test]" && pytest -n 2'

"""docs/tasks/troubleshooting.md has a row for every error code, reason of health and class of faults."""

from __future__ import annotations

import re
from pathlib import Path

from exo_mesh.api.errors import _RULES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "tasks" / "troubleshooting.md").read_text()
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| ")]
FINE = {"ok", "degraded"}
"""Levels of health, in the table above that of the reasons; `failed` is a reason as well."""


def test_every_error_code_is_a_symptom() -> None:
    named = {word for row in ROWS for word in re.findall(r"`(\w+)`", row[0])}
    assert not _RULES.keys() - named


def test_every_reason_of_health_is_a_symptom() -> None:
    named = {word for row in ROWS for word in re.findall(r"`(\w+)`", row[0])}
    table = (DOCS / "reference" / "health.md").read_text().partition("## Runners")[0]
    reasons = {
        word for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for word in re.findall(r"`(\w+)`", row)
    }
    assert len(reasons) > 20
    assert not reasons - FINE - named


def test_every_class_of_faults_has_a_row() -> None:
    faults = (DOCS / "how-it-works" / "faults.md").read_text()
    classes = set(re.findall(r"^\| (F\d+) \|", faults, re.MULTILINE))
    assert len(classes) == 26
    assert classes == {word for row in ROWS for word in re.findall(r"\bF\d+\b", " ".join(row))}


def test_every_row_has_a_cause_and_something_to_do() -> None:
    assert len(ROWS) > 70
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in ROWS)


def test_every_route_that_a_row_names_is_in_the_api() -> None:
    api = (DOCS / "reference" / "api.md").read_text()
    routes = re.findall(r"`((?:GET|POST|DELETE) )(v1/[\w/]+)`", PAGE)
    assert len(routes) >= 4
    for method, path in routes:
        assert f"`{method}/{path}`" in api, path

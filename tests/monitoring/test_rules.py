"""promtool accepts the rules of monitoring/prometheus; every alert fires, resolves and is explained."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from exo_mesh.api.errors import _RULES
from tests.support.dashboards import MONITORING

FOLDER = MONITORING / "prometheus"
RULES = sorted((FOLDER / "rules").glob("*.yml"))
TESTS = sorted((FOLDER / "tests").glob("*.yml"))


@cache
def alerts() -> dict[str, dict[str, Any]]:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def check(promtool: str, *arguments: object) -> None:
    done = subprocess.run([promtool, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_and_the_rules_are_valid(promtool: str) -> None:
    check(promtool, "check", "config", "--lint=all", "--lint-fatal", FOLDER / "prometheus.yml")
    check(promtool, "check", "rules", "--lint=all", "--lint-fatal", *RULES)


def test_the_configuration_is_valid_with_a_key_as_well(promtool: str, tmp_path: Path) -> None:
    text = (FOLDER / "prometheus.yml").read_text()
    assert text.count("# authorization: ") == 3
    (tmp_path / "prometheus.yml").write_text(text.replace("# authorization: ", "authorization: "))
    (tmp_path / "key").write_text("a key")
    check(promtool, "check", "config", tmp_path / "prometheus.yml")


@pytest.mark.extended
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_the_unit_tests_of_the_alerts_pass(promtool: str, path: Path) -> None:
    check(promtool, "test", "rules", path)


def test_every_alert_has_a_unit_test_that_fires_and_then_resolves() -> None:
    resolved = set()
    for path in TESTS:
        for case in yaml.safe_load(path.read_text())["tests"]:
            moments = [(each["alertname"], bool(each["exp_alerts"])) for each in case["alert_rule_test"]]
            resolved |= {name for name, fires in moments if fires and (name, False) == moments[-1]}
    assert resolved == set(alerts())


def test_every_alert_is_explained_in_the_readme() -> None:
    readme = (MONITORING / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(ExoMesh\w+)` \| (\w+) \|", readme, re.M))
    assert rows == {name: rule["labels"]["severity"] for name, rule in alerts().items()}
    assert f"and {len(rows)} alerts" in readme


@pytest.mark.parametrize("name", alerts())
def test_an_alert_says_what_is_wrong_and_what_helps(name: str) -> None:
    rule = alerts()[name]
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description"}
    assert rule["annotations"]["description"].endswith(".") and not rule["annotations"]["summary"].endswith(".")


def test_only_errors_of_callers_are_left_out_of_the_error_rate() -> None:
    text = (FOLDER / "rules" / "recording.yml").read_text()
    left_out = re.search(r'type!~"([^"]+)"', text)
    assert left_out
    statuses = {code: _RULES[code].status for code in left_out[1].split("|")}
    assert all(status < 500 for status in statuses.values()), statuses

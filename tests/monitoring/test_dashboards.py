"""The dashboards of monitoring/grafana keep the rules of Grafana's dashboard linter, and name metrics that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.dashboards import FILES, MONITORING, filled_in, load, panels, targets

ROOT = MONITORING.parent
BOARDS = {path.stem: load(path) for path in FILES}
UNITS = {
    "none", "short", "percentunit", "bool_yes_no", "s", "bytes", "Bps", "reqps", "ops", "watt", "joule", "celsius",
}  # fmt: skip
"""Of the units that the linter knows, those that we use."""
OTHERS = {
    "process_start_time_seconds", "process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds",
    "process_max_fds", "node_cpu_seconds_total", "node_network_receive_bytes_total",
    "node_network_transmit_bytes_total", "node_vmstat_pswpin", "node_vmstat_pswpout",
}  # fmt: skip
"""Metrics that prometheus-client and node_exporter have."""
SELECTOR = re.compile(r"\b(?P<name>[a-z_:]+[a-z])\{(?P<matchers>[^}]*)\}")
OF_TARGETS = {"job", "instance", "node", "le"}
"""Labels that Prometheus and the list of targets add, and that of buckets."""


def documented() -> dict[str, set[str]]:
    """The labels of each metric that the documentation has."""
    found = {}
    for page in ("metrics.md", "power.md"):
        path = ROOT / "docs" / "reference" / page
        rows = re.findall(r"^\| `(exo_mesh_\w+)` \| \w+ \|([^|]*)\|", path.read_text(), re.M) if path.exists() else ()
        found |= {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    return found


def base_name(sample: str, known: set[str]) -> str:
    """The metric that a series belongs to: histograms have three."""
    stem = re.sub(r"_(bucket|sum|count)$", "", sample)
    return stem if stem in known else sample


def test_the_files_are_what_the_script_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="not installed: grafana-foundation-sdk")
    made = subprocess.run(
        [sys.executable, "-m", "tools.dashboards", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr


def test_there_are_four_boards_with_ids_of_their_own() -> None:
    assert set(BOARDS) == {"overview", "model", "ring", "node"}
    assert {board["uid"] for board in BOARDS.values()} == {f"exo-mesh-{name}" for name in BOARDS}
    assert len({board["title"] for board in BOARDS.values()}) == len(BOARDS)


@pytest.mark.parametrize("name", BOARDS)
def test_the_variables_are_a_data_source_job_and_instance_and_labels(name: str) -> None:
    datasource, *queries = BOARDS[name]["templating"]["list"]
    assert (datasource["type"], datasource["name"], datasource["label"], datasource["query"]) == (
        "datasource", "datasource", "Data source", "prometheus",
    )  # fmt: skip
    assert [(each["name"], each["label"]) for each in queries[:2]] == [("job", "Job"), ("instance", "Instance")]
    for each in queries:
        assert each["type"] == "query" and each["datasource"]["uid"] == "${datasource}"
        assert each["multi"] and each["includeAll"] and each["allValue"] == ".+"
        assert each["refresh"] == 2, "asked for again when the time range changes"
        assert re.fullmatch(r"label_values\(exo_mesh_\w+(\{.*\})?, \w+\)", each["query"])


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_cannot_be_edited_in_the_browser(name: str) -> None:
    assert BOARDS[name]["editable"] is False


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_has_title_description_unit_data_source_and_queries(name: str) -> None:
    shown = panels(BOARDS[name])
    for panel in shown:
        where = panel["title"]
        assert panel["title"] and panel["description"].endswith("."), where
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, where
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, where
        assert panel["targets"] and all(target["expr"] for target in panel["targets"]), where
        tables = panel["type"] == "table"
        assert all(target["instant"] == tables and target["range"] != tables for target in panel["targets"]), where
        assert all(target["legendFormat"] or tables for target in panel["targets"]), where
    assert len({panel["title"] for panel in shown}) == len(shown)
    ids = [panel["id"] for panel in BOARDS[name]["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", BOARDS)
def test_panels_do_not_overlap_and_stay_within_24_columns(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARDS[name]["panels"]:
        at: dict[str, Any] = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


def test_every_selector_has_job_and_instance() -> None:
    for target in targets():
        selectors = list(SELECTOR.finditer(target.expr))
        assert selectors, target.name
        for found in selectors:
            assert 'job=~"$job"' in found["matchers"] and 'instance=~"$instance"' in found["matchers"], target.name
        bare = set(re.findall(r"\b(?:exo_mesh|process|node)_\w+", SELECTOR.sub("", target.expr)))
        assert not bare, f"{target.name}: no selector after {bare}"


def test_a_range_is_the_rate_interval_and_counters_are_seen_as_rates() -> None:
    for target in targets():
        assert set(re.findall(r"\[(.*?)\]", target.expr)) <= {"$__rate_interval"}, target.name
        for found in SELECTOR.finditer(target.expr):
            if re.search(r"_(total|bucket|sum|count)$", found["name"]):
                before, after = target.expr[: found.start()], target.expr[found.end() :]
                is_rate = before.endswith(("rate(", "increase(")) and after.startswith("[$__rate_interval])")
                assert is_rate, f"{target.name}: {found['name']}"


def test_every_metric_and_label_is_documented() -> None:
    known = documented()
    for target in targets():
        for found in SELECTOR.finditer(target.expr):
            name = base_name(found["name"], set(known))
            assert name in known or name in OTHERS, f"{target.name}: {name} is in neither metrics.md nor power.md"
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", found["matchers"])) - OF_TARGETS
            assert labels <= known.get(name, labels), f"{target.name}: {name} has no labels {labels - known[name]}"
        used = {label for by in re.findall(r"by \(([^)]*)\)", target.expr) for label in re.split(r",\s*", by)}
        names = {base_name(found["name"], set(known)) for found in SELECTOR.finditer(target.expr)}
        there = set().union(*(known.get(name, set()) for name in names))
        assert used - OF_TARGETS <= there, f"{target.name}: nothing has the labels {used - OF_TARGETS - there}"


def test_prometheus_can_parse_every_query(tmp_path: Path, promtool: str) -> None:
    rules = [f"  - {{record: x:y, expr: {filled_in(target.expr, '1m')!r}}}" for target in targets()]
    (tmp_path / "rules.yml").write_text("\n".join(["groups:", "- name: x", "  rules:", *rules]))
    checked = subprocess.run(
        [promtool, "check", "rules", "--lint=none", str(tmp_path / "rules.yml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr

"""The compose files, the provisioning of Grafana and the configuration of Vector fit the files that they name."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from jsonschema.validators import validator_for

from exo_mesh.settings.default_paths import DEFAULT_API_URL
from tests.support.dashboards import MONITORING

COMPOSE = ["docker-compose.yml", "docker-compose.logs.yml"]


@cache
def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((MONITORING / name).read_text())
    return content


@pytest.mark.parametrize("name", COMPOSE)
def test_a_compose_file_has_the_schema_of_the_compose_specification(name: str) -> None:
    found = find_spec("check_jsonschema")
    if found is None or found.origin is None:
        pytest.skip("not installed: check-jsonschema")
    path = Path(found.origin).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema = json.loads(path.read_text())
    validator_for(schema)(schema).validate(read(name))


@pytest.mark.parametrize("name", COMPOSE)
def test_what_a_compose_file_mounts_from_here_exists(name: str) -> None:
    volumes = [volume for service in read(name)["services"].values() for volume in service["volumes"]]
    mounted = [volume.split(":")[0] for volume in volumes if volume.startswith("./")]
    assert mounted and all((MONITORING / path).exists() for path in mounted)
    named = {volume.split(":")[0] for volume in volumes if volume[0] not in "./"}
    assert named == set(read(name)["volumes"])


def test_only_the_password_has_no_default_and_the_example_names_it() -> None:
    text = "".join((MONITORING / name).read_text() for name in COMPOSE)
    used = dict(re.findall(r"\$\{(\w+):([-?])", text))
    assert {name for name, kind in used.items() if kind == "?"} == {"GRAFANA_PASSWORD"}
    example = dict(re.findall(r"^(\w+)=(.*)$", (MONITORING / ".env.example").read_text(), re.M))
    assert example["GRAFANA_PASSWORD"] == "" and set(example) <= set(used)


def test_nothing_listens_beyond_the_loopback_unless_asked_to() -> None:
    text = "".join((MONITORING / name).read_text() for name in COMPOSE)
    assert set(re.findall(r"MONITORING_ADDRESS:-([^}]*)", text)) == {"127.0.0.1"} and "ports:" not in text


def test_prometheus_asks_the_usual_port_of_a_node_for_its_targets() -> None:
    jobs = {job["job_name"]: job for job in read("prometheus/prometheus.yml")["scrape_configs"]}
    for name in ("exo-mesh", "node"):
        urls = [each["url"] for each in jobs[name]["http_sd_configs"]]
        assert urls == [f"http://localhost:{urlsplit(DEFAULT_API_URL).port}/v1/prometheus/targets"]


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    grafana = read("docker-compose.yml")["services"]["grafana"]
    source = read("grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
    assert source["url"] == "$PROMETHEUS_URL" and "PROMETHEUS_URL" in grafana["environment"]
    assert source["jsonData"]["timeInterval"] == read("prometheus/prometheus.yml")["global"]["scrape_interval"]
    provider = read("grafana/provisioning/dashboards/exo-mesh.yml")["providers"][0]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]


def test_vector_connects_what_it_names_and_reads_the_fields_of_our_log() -> None:
    config = read("vector/vector.yaml")
    names = set(config["sources"]) | set(config["transforms"])
    for part in (*config["transforms"].values(), *config["sinks"].values()):
        assert set(part["inputs"]) <= names
    assert config["sources"]["journal"]["include_units"] == ["exo-mesh.service"]
    sink = config["sinks"]["victorialogs"]
    fields = set(re.findall(r"(?:_stream_fields|_msg_field|_time_field)=([\w,]+)", sink["uri"]))
    assert fields == {"host,service,level", "message", "timestamp"}
    assert "VICTORIALOGS_URL" in read("docker-compose.logs.yml")["services"]["vector"]["environment"]

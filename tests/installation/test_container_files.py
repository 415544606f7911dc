"""Dockerfile and compose.yaml without a container engine: a linter, a schema, and the programs that they configure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.settings.loading import load_settings
from tests.support.installs import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

_DEFAULT = re.compile(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}")


def tool(name: str) -> str:
    """A program of PACKAGING_TOOLS or PATH; the test is skipped without it."""
    path = [os.environ.get("PACKAGING_TOOLS", ""), os.environ["PATH"], "/usr/sbin"]
    found = shutil.which(name, path=os.pathsep.join(filter(None, path)))
    if found is None:
        pytest.skip(f"{name} is not installed; PACKAGING_TOOLS names a folder with it")
    return found


def check(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """What compose makes of the file where no variable is set but the password."""
    text = _DEFAULT.sub(lambda match: match[2] or "secret", (ROOT / "compose.yaml").read_text())
    return dict(yaml.safe_load(text))


@pytest.mark.extended
def test_the_linter_of_dockerfiles_finds_nothing() -> None:
    check(tool("hadolint"), ROOT / "Dockerfile")


@pytest.mark.extended
def test_the_compose_file_follows_the_schema_of_compose() -> None:
    check(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", ROOT / "compose.yaml")


def test_the_image_gets_what_the_build_needs_and_no_more() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    lines = re.findall(r"^COPY (?!--)(.*) \S+$", dockerfile, re.MULTILINE)
    copied = {name for line in lines for name in line.split()}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_the_node_is_no_root_and_has_a_volume_a_health_check_and_a_stop_signal() -> None:
    final = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert "\nUSER 10001:10001\n" in final
    assert "\nVOLUME /var/lib/exo-mesh\n" in final
    assert "\nSTOPSIGNAL SIGTERM\n" in final
    assert "/healthz" in final and "\nHEALTHCHECK " in final


def test_three_nodes_know_each_other_and_have_time_to_stop(compose: dict[str, Any]) -> None:
    nodes = {name: one for name, one in compose["services"].items() if one["image"].startswith("exo-mesh")}
    assert sorted(nodes) == ["node-1", "node-2", "node-3"]
    for name, node in nodes.items():
        loaded = load_settings({}, {key: str(value) for key, value in node["environment"].items()})
        assert not loaded.warnings
        assert len(loaded.settings.bootstrap_peers) == 3
        assert int(node["stop_grace_period"].removesuffix("s")) > loaded.settings.stop_grace + 5
        assert (node["hostname"], node["volumes"]) == (name, [f"{name}:/var/lib/exo-mesh"])
    assert set(compose["volumes"]) == {*nodes, "prometheus", "grafana"}


def test_what_is_mounted_is_there(compose: dict[str, Any]) -> None:
    mounted = [volume.split(":")[0] for one in compose["services"].values() for volume in one.get("volumes", [])]
    missing = [path for path in mounted if path.startswith("./") and not (ROOT / path).exists()]
    assert missing == []


def test_nothing_listens_beyond_this_machine(compose: dict[str, Any]) -> None:
    ports = [port for one in compose["services"].values() for port in one.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_nginx_takes_its_configuration(compose: dict[str, Any], tmp_path: Path) -> None:
    upstream = re.sub(r"node-(\d):", r"127.0.0.\1:", compose["configs"]["upstream"]["content"])
    (tmp_path / "upstream.conf").write_text(upstream)
    site = ROOT / "nginx/exo-mesh.conf"
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; client_body_temp_path {tmp_path}; proxy_temp_path {tmp_path};\n"
        f"fastcgi_temp_path {tmp_path}; uwsgi_temp_path {tmp_path}; scgi_temp_path {tmp_path};\n"
        f"include {tmp_path}/upstream.conf; include {site}; }}\n"
    )
    check(tool("nginx"), "-t", "-q", "-p", tmp_path, "-c", tmp_path / "nginx.conf")


def test_prometheus_takes_its_configuration_and_its_rules(compose: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(ROOT / "monitoring/prometheus/rules", tmp_path / "rules")
    (tmp_path / "prometheus.yml").write_text(compose["configs"]["prometheus"]["content"])
    check(tool("promtool"), "check", "config", tmp_path / "prometheus.yml")

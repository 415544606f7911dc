"""A real Prometheus with the configuration of monitoring/, made fast for a test, and the API that Grafana uses."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from exo_mesh.cli.client.child_node import free_port
from tests.support.dashboards import MONITORING
from tests.support.processes import eventually

SCRAPE = "500ms"
TARGETS = "/v1/prometheus/targets"


class Prometheus:
    """How to ask it. Every answer is what the HTTP API has below `data`."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **parameters: str) -> Any:
        body = urllib.parse.urlencode(parameters).encode() or None
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.url}/api/v1/{path}", body, timeout=5) as reply:
            return json.load(reply)["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an expression now."""
        found: list[dict[str, Any]] = self.ask("query", query=expr)["result"]
        return found

    def targets(self, job: str) -> list[dict[str, Any]]:
        """The targets of a job that Prometheus scrapes, sorted by address."""
        active = [each for each in self.ask("targets")["activeTargets"] if each["scrapePool"] == job]
        return sorted(active, key=lambda each: str(each["scrapeUrl"]))

    def is_up(self) -> bool:
        try:
            self.ask("status/buildinfo")
        except OSError:
            return False
        return True


def configuration(nodes: Sequence[str], exporter_port: int) -> dict[str, Any]:
    """The checked-in prometheus.yml for other nodes and shorter times. nodes: API addresses that list the targets."""
    config: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": SCRAPE}
    config["rule_files"] = [str(MONITORING / "prometheus" / path) for path in config["rule_files"]]
    jobs = [job for job in config["scrape_configs"] if job["job_name"] != "prometheus"]
    for job in jobs:
        job["http_sd_configs"] = [{"url": node + TARGETS, "refresh_interval": "1s"} for node in nodes]
        for rule in job.get("relabel_configs", ()):
            if rule.get("target_label") == "__address__":
                rule["replacement"] = rule["replacement"].replace("9100", str(exporter_port))
    return {**config, "scrape_configs": jobs}


@contextmanager
def running(command: str, folder: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    """A Prometheus with this configuration and an empty store, ended afterwards."""
    port = free_port()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    flags = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([command, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        found = Prometheus(port)
        assert eventually(found.is_up, 20), (folder / "prometheus.log").read_text()
        yield found
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def node_exporter(command: str, port: int) -> Iterator[None]:
    """A real node_exporter of this machine."""
    collectors = [f"--collector.{name}" for name in ("cpu", "netdev", "vmstat")]
    flags = [f"--web.listen-address=127.0.0.1:{port}", "--collector.disable-defaults", *collectors]
    process = subprocess.Popen([command, *flags], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)

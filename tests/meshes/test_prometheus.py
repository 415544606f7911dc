"""The real programs of Prometheus and a closed mesh with TLS: its metrics are clean, and one node leads to all."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exo_mesh.security.secret import new_secret, write_new
from tests.security.test_api_tls import write_pair
from tests.support.peers import Peer, control_ports, mesh
from tests.support.processes import eventually

PROGRAMS = ("promtool", "prometheus")

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)), reason="needs promtool and prometheus: apt-get install prometheus"
    ),
]

SCRAPES = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: exo-mesh
    authorization: {{type: Bearer, credentials: {key}}}
    tls_config: {{ca_file: {cert}, server_name: studio.example.org}}
    http_sd_configs:
      - url: {url}/v1/prometheus/targets
        refresh_interval: 1s
        authorization: {{type: Bearer, credentials: {key}}}
        tls_config: {{ca_file: {cert}, server_name: studio.example.org}}
"""


@contextmanager
def prometheus(folder: Path, config: str) -> Iterator[str]:
    """Its address, while it runs by this configuration."""
    (folder / "prometheus.yml").write_text(config)
    (port,) = control_ports(1)
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *flags, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


def scraped(address: str, query: str) -> dict[str, float]:
    """Value by the label `node`."""
    try:
        with urllib.request.urlopen(f"{address}/api/v1/query?query={query}", timeout=5) as reply:
            series = json.load(reply)["data"]["result"]
    except OSError:
        return {}
    return {one["metric"]["node"]: float(one["value"][1]) for one in series}


def asked(peers: list[Peer]) -> None:
    """The model is placed on both, and has answered three times."""
    peers[0].place(min_peers=2)
    for number in range(3):
        peers[0].chat(f"question {number}", max_tokens=40, ignore_eos=True)


def test_one_node_of_a_closed_mesh_with_tls_leads_prometheus_to_all(tmp_path: Path) -> None:
    cert, own_key = write_pair(tmp_path / "tls")
    write_new(tmp_path / "mesh.secret", new_secret())
    own = ["--secret-file", str(tmp_path / "mesh.secret"), "--tls-cert", str(cert), "--tls-key", str(own_key)]
    with mesh(tmp_path, [own, own], engine="dummy") as peers:
        asked(peers)
        key = peers[0].api.post("/v1/keys", {"role": "use"})["key"]
        assert eventually(lambda: "exo_mesh_lap_seconds_count" in "".join(p.api.text("/metrics") for p in peers), 10)
        for peer in peers:
            text = peer.api.text("/metrics").encode()
            told = subprocess.run(["promtool", "check", "metrics"], input=text, check=False, capture_output=True)
            assert (told.returncode, told.stdout, told.stderr) == (0, b"", b"")
        with prometheus(tmp_path, SCRAPES.format(key=key, cert=cert, url=peers[1].url)) as address:
            names = {str(peer.ready["name"]) for peer in peers}
            assert eventually(lambda: scraped(address, "up") == dict.fromkeys(names, 1.0), 20), scraped(address, "up")

            assert eventually(lambda: scraped(address, "exo_mesh_nodes_active") == dict.fromkeys(names, 2.0), 10)
            first = str(peers[0].ready["name"])
            ended = "sum%20by(node)(exo_mesh_requests_total{status=~%22stop|length%22})"
            assert scraped(address, ended) == {first: 3.0}
            generated = scraped(address, "exo_mesh_tokens_generated_total")
            assert generated == {first: 120.0}

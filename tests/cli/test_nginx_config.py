"""`exo-mesh nginx-config`: what it writes from a view, what gets into the file, and when it leaves the file alone."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.balancing.asking import WrittenConfig, able
from exo_mesh.cli.balancing.installing import ConfigurationRefused, check
from exo_mesh.cli.balancing.members import from_elsewhere, upstreams_of
from exo_mesh.cli.balancing.writing import VARIANTS, Site, Upstream, site_text, upstream_text
from exo_mesh.cli.main import main
from exo_mesh.errors import MeshError
from tests.support.nginx import NGINX, SHIPPED
from tests.support.proxies import CADDY, HAPROXY
from tools.write_nginx import SITES, shipped

needs_nginx = pytest.mark.skipif(NGINX is None, reason="not installed: nginx")

TWO = [Upstream("192.168.1.11:52415", "studio"), Upstream("[fd00::2]:52415", "box", memory_bytes=8 << 30)]


def state(*peers: dict[str, Any], draining: str = "") -> dict[str, Any]:
    readings = {peer["id"]: {"draining": peer["id"] == draining, "total_bytes": 8 << 30} for peer in peers}
    return {"view": {"peers": list(peers)}, "telemetry": readings}


def peer(name: str, api_url: str | None) -> dict[str, Any]:
    return {"id": name * 4, "name": name, "api_url": api_url}


@needs_nginx
@pytest.mark.parametrize("variant", VARIANTS)
def test_nginx_accepts_each_variant(variant: str) -> None:
    assert NGINX is not None
    check(upstream_text(TWO, variant), NGINX, has_site=False)
    check(upstream_text([Upstream("10.0.0.1:1", takes_new=False), *TWO], variant), NGINX, has_site=False)


@needs_nginx
@pytest.mark.parametrize("name", [name for name, site in SITES.items() if not site.tls_cert])
def test_nginx_accepts_each_shipped_site(name: str) -> None:
    assert NGINX is not None
    files = shipped()
    check(files["upstream-least-conn.conf"] + files[name], NGINX, has_site=True)
    assert "proxy_pass https://exo_mesh" in site_text(SITES[name], "https")
    check(files["upstream-weights.conf"] + site_text(SITES[name], "https"), NGINX, has_site=True)


def test_peers_become_servers_and_only_addresses_get_into_the_file() -> None:
    hostile = 'x; }\n    include /etc/passwd; #"'
    found = upstreams_of(
        state(
            peer("a", "http://192.168.1.11:52415"),
            peer("b", "https://[fd00::2]:443/"),
            peer("c", "http://studio.local:52415"),
            peer("d", "http://0.0.0.0:52415"),
            peer("e", None),
            peer("f", f"http://{hostile}:52415"),
            peer("g", "http://10.0.0.1:99999"),
            peer("i", "http://[fe80::2]:52415"),
            {"id": "hhhh", "name": hostile, "api_url": "http://10.0.0.9:52415"},
            draining="aaaa",
        )
    )
    assert {key: (one.address, one.scheme, one.takes_new) for key, one in found.items()} == {
        "aaaa": ("192.168.1.11:52415", "http", False),
        "bbbb": ("[fd00::2]:443", "https", True),
        "cccc": ("studio.local:52415", "http", True),
        "hhhh": ("10.0.0.9:52415", "http", True),
    }
    text = upstream_text(list(found.values()), "least-conn")
    assert "server 192.168.1.11:52415 max_fails=3 fail_timeout=30s down;" in text
    named = next(line for line in text.splitlines() if "10.0.0.9:52415 max" in line)
    assert named.endswith("# x_ __    include _etc_passwd_ __"), "a name is a comment of one line"


def test_a_node_on_the_loopback_of_its_machine_is_left_out_unless_all_are() -> None:
    here = [Upstream("127.0.0.1:52415"), Upstream("[::1]:52415")]
    assert from_elsewhere([*here, *TWO]) == TWO
    assert from_elsewhere(here) == here


def test_a_weight_is_the_memory_in_proportion_to_the_smallest() -> None:
    sizes = [96, 16, 0, 1024]
    nodes = [Upstream(f"10.0.0.{index}:1", memory_bytes=size << 30) for index, size in enumerate(sizes)]
    text = upstream_text(nodes, "weights")
    assert [line.partition("weight=")[2][:2] for line in text.splitlines() if "weight=" in line] == [
        "6;", "1;", "1;", "20",
    ]  # fmt: skip


@needs_nginx
def test_the_file_changes_and_nginx_reloads_only_when_the_mesh_changes(tmp_path: Path) -> None:
    reloads, path = tmp_path / "reloads", tmp_path / "upstream.conf"
    assert NGINX is not None
    note = shlex.join(["sh", "-c", f"echo once >> {reloads}"])
    written = WrittenConfig(path, "least-conn", None, note, NGINX)
    assert written.update(TWO) == f"{path}: 2 nodes; reloaded"
    assert written.update(TWO) == f"{path} is up to date: 2 nodes"
    assert written.update(TWO[:1]) == f"{path}: 1 node; reloaded"
    assert reloads.read_text().count("once") == 2
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == [], "nothing is left beside it"


@needs_nginx
def test_a_configuration_that_nginx_refuses_does_not_replace_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "upstream.conf"
    path.write_text("# the old one")
    assert NGINX is not None
    written = WrittenConfig(path, "least-conn", None, "false", NGINX)
    with pytest.raises(ConfigurationRefused, match="host not found in upstream"):
        written.update([Upstream("no-such-machine.invalid:52415")])
    assert path.read_text() == "# the old one"


def test_a_reload_that_fails_is_tried_again(tmp_path: Path) -> None:
    path, may = tmp_path / "upstream.conf", tmp_path / "may"
    written = WrittenConfig(path, "least-conn", None, f"test -e {may}", "")
    with pytest.raises(ConfigurationRefused, match="failed"):
        written.update(TWO)
    may.touch()
    assert written.update(TWO) == f"{path} is up to date: 2 nodes; reloaded"
    assert written.update(TWO) == f"{path} is up to date: 2 nodes"


@pytest.mark.parametrize("nodes", [[], [Upstream("10.0.0.1:1", takes_new=False)]])
def test_an_upstream_never_becomes_empty(nodes: list[Upstream]) -> None:
    with pytest.raises(MeshError):
        able(nodes)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--watch"], "--output FILE"),
        (["--reload", "true"], "--output FILE"),
        (["--every", "0", "--output", "x"], "--every"),
        (["--whole", "--tls-cert", "a.pem"], "need each other"),
        (["--whole", "--listen", "80; include x"], "cannot be written"),
        (["--whole", "--limit", "many"], "cannot be written"),
        (["--whole", "--status-port", "8080"], "RKLLAMA"),
    ],
)
def test_what_cannot_be_written_is_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nginx-config", *argv]) == exit_codes.FAILED
    assert said in capsys.readouterr().err


def test_without_a_mesh_the_file_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "upstream.conf"
    path.write_text("# the old one")
    argv = ["nginx-config", "--output", str(path), "--api-url", "http://127.0.0.1:9"]
    assert main(argv) == exit_codes.NO_NODE
    assert path.read_text() == "# the old one" and "no node answers" in capsys.readouterr().err


def test_the_status_page_is_local_and_not_where_rkllama_is() -> None:
    text = site_text(Site())
    assert "listen 127.0.0.1:8081;" in text and "8080;" not in text


@pytest.mark.skipif(HAPROXY is None, reason="not installed: haproxy")
def test_haproxy_accepts_its_example() -> None:
    done = subprocess.run(
        [str(HAPROXY), "-c", "-f", SHIPPED / "haproxy.cfg"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr


@pytest.mark.extended
@pytest.mark.skipif(CADDY is None, reason="not installed: caddy")
def test_caddy_accepts_its_example() -> None:
    command = [str(CADDY), "validate", "--adapter", "caddyfile", "--config", SHIPPED / "Caddyfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and '"warn"' not in done.stderr, done.stderr

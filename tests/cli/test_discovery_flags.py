"""What a node says to flags of discovery that cannot be used, and what `exo-mesh topology` shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.child_node import free_port
from exo_mesh.cli.main import main
from exo_mesh.settings.loading import load_settings
from tests.support.processes import QUIET_FLAGS, eventually, read_until, run, start

NODE = [flag for flag in QUIET_FLAGS if flag not in ("--discovery", "none")]


@pytest.mark.parametrize("flag", ["--peers-file", "--discovery-config-path"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ('{"peers": {"studio": {"address": "10.0.0.1", "port": 0}}}', "peers.studio.port: must be a port"),
    ],
)
def test_a_peers_file_that_cannot_be_used_stops_the_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, content: str | None, message: str
) -> None:
    path = tmp_path / "peers.json"
    if content is not None:
        path.write_text(content)
    home = ["--home", str(tmp_path / "home")]
    assert main(["serve", *NODE, *home, "--no-api", "--discovery", "manual", flag, str(path)]) == exit_codes.USAGE
    complaint = capsys.readouterr().err
    assert f"{path}: {message}" in complaint and complaint.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--discovery", "manual"], "--discovery manual needs --peers-file or --bootstrap-peers"),
        (["--discovery", "udp,tailscale"], "--discovery tailscale needs --tailscale-api-key-file"),
    ],
)
def test_a_way_without_what_it_needs_stops_the_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["serve", *NODE, "--home", str(tmp_path / "home"), "--no-api", *flags]) == exit_codes.USAGE
    assert message in capsys.readouterr().err


def test_the_default_is_udp_and_mdns_together(tmp_path: Path) -> None:
    assert load_settings({"home": [str(tmp_path)]}, {}).settings.discovery == ("udp", "mdns")


@pytest.mark.extended
def test_the_topology_shows_links_and_who_was_refused(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    (tmp_path / "peers").write_text("".join(f"127.0.0.1:{port}\n" for port in ports))
    common = [*NODE, "--discovery", "manual", "--peers-file", str(tmp_path / "peers"), "--no-api"]
    common.remove("0")
    common.remove("--grpc-port")
    first = [flag for flag in common if flag != "--no-api"]
    nodes = [
        start(["serve", *flags, "--grpc-port", str(port), "--name", name], tmp_path / name)
        for port, name, flags in (
            (ports[0], "one", [*first, "--api-port", "0"]),
            (ports[1], "two", common),
            (ports[2], "stranger", [*common, "--namespace", "x"]),
        )
    ]
    try:
        shown = read_until(nodes[0], "http://")
        url = next(word for word in shown.split() if word.startswith("http://")).removesuffix("/v1")

        def topology() -> str:
            return run(["topology", "--api-url", url], tmp_path / "home").stdout

        assert eventually(lambda: "round trip" in topology() and "refused:" in topology(), 30), topology()
        shown = topology()
        # who calls first is refused unheard: then its address is all that is known of the other one
        assert "stranger" in shown or f"127.0.0.1:{ports[2]}" in shown
        assert f"127.0.0.1:{ports[1]}" in shown and "namespace " in shown
        listed = json.loads(run(["topology", "--api-url", url, "--json"], tmp_path / "home").stdout)
        assert [link["address"] for link in listed["links"]] == [f"127.0.0.1:{ports[1]}"]
        assert all("namespace" in reason for reason in listed["refused"])
    finally:
        for node in nodes:
            node.terminate()
            node.communicate(timeout=20)

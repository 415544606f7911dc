"""A host that goes to sleep and is woken, with real nodes and real Ethernet frames between namespaces."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.discovery.netns import Host, measured, network, why_not

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]

START_S = 60.0
FLAGS = ("--discovery", "udp")

CARD = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.bind(("", 9))
    print("listening", flush=True)
    print(sock.recv(200).hex(), flush=True)
"""
"""What the network card of a sleeping machine does: it waits for its packet."""


@pytest.fixture(autouse=True)
def namespaces() -> None:
    """Skips where there can be none."""
    if reason := why_not():
        pytest.skip(reason)


def peer_rows(host: Host) -> dict[str, list[str]]:
    """The codes of the reasons of each peer that a node knows of."""
    state: dict[str, Any] = host.get("/state") or {"health": {}}
    rows = state["health"].get("peer_health", ())
    return {row["name"]: [reason["code"] for reason in row["reasons"]] for row in rows}


def mac_of(host: Host) -> str:
    listed = subprocess.run(["ip", "-n", host.ns, "-j", "link", "show", "eth0"], check=True, capture_output=True)
    return str(json.loads(listed.stdout)[0]["address"])


@pytest.mark.slow
def test_a_host_that_sleeps_is_shown_so_and_woken_by_a_peer_that_was_restarted(tmp_path: Path) -> None:
    with network(tmp_path, 2) as (one, two):
        for host in (one, two):
            host.start(*FLAGS)
        measured(lambda: one.sees() == two.sees() == ["h1", "h2"], START_S, "two nodes see each other")
        mac = mac_of(two)
        known = tmp_path / "home1" / "known_peers.json"
        measured(lambda: known.exists() and mac in known.read_text(), 20, "the MAC address is written down")
        assert two.post("/admin/sleep", {}) == {"status": "asleep", "told": 1}
        assert two.node is not None
        two.node.send_signal(signal.SIGSTOP)
        measured(lambda: "asleep" in peer_rows(one).get("h2", []), 3, "it is asleep, and not dead")
        measured(lambda: '"asleep_at": 0.0' not in known.read_text(), 20, "and that is written down")
        one.kill()
        one.start(*FLAGS)
        measured(lambda: "asleep" in peer_rows(one).get("h2", []), START_S, "a node that was restarted knows it too")
        status = [sys.executable, "-m", "exo_mesh.cli.main", "status", "--home", str(one.home)]
        shown = one.popen(*status, stdout=subprocess.PIPE, text=True).communicate(timeout=60)[0]
        assert any(line.split()[:2] == ["h2", "asleep"] for line in shown.splitlines()), shown
        assert "exo-mesh wake h2" in shown
        card = two.popen(sys.executable, "-c", CARD, stdout=subprocess.PIPE, text=True)
        assert card.stdout is not None
        assert card.stdout.readline() == "listening\n"
        verb = [sys.executable, "-m", "exo_mesh.cli.main", "wake", "h2", "--home", str(one.home)]
        waking = one.popen(*verb, stdout=subprocess.PIPE, text=True)
        assert card.stdout.readline().strip() == "ff" * 6 + mac.replace(":", "") * 16
        two.node.send_signal(signal.SIGCONT)
        two.post("/admin/awake", {})  # as the unit of systemd does after a sleep
        said = waking.communicate(timeout=60)[0]
        assert said == "sent Wake-on-LAN packets to h2 from h1\nh2 is in the mesh again\n"
        assert waking.returncode == 0
        assert "asleep" not in peer_rows(one)["h2"]

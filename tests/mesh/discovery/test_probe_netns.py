"""Hosts between which a firewall drops probe datagrams: their peers call instead, and suspect nobody."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.mesh.discovery.netns import Host, measured, network, why_not

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]

PORT = "5000"
START_S = 90.0
BLOCKED_S = 15.0


@pytest.fixture(autouse=True)
def firewall() -> None:
    """Skips where there can be no namespaces or no firewall."""
    if reason := why_not() or ("" if shutil.which("iptables") else "the command iptables is missing"):
        pytest.skip(reason)


def iptables(host: Host, *words: str) -> str:
    command = ["ip", "netns", "exec", host.ns, "iptables", *words]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no firewall here: {made.stderr.strip()}")
    return made.stdout


def probes(host: Host) -> int:
    """Datagrams that have come to the host's port for probes since the rule was made."""
    listed = iptables(host, "-L", "INPUT", "-v", "-n", "-x").splitlines()
    return int(next(line for line in listed if f"dpt:{PORT}" in line).split()[0])


def test_peers_whose_datagrams_a_firewall_drops_are_never_suspected(tmp_path: Path) -> None:
    with network(tmp_path, 3) as hosts:
        for host in hosts:
            iptables(host, "-A", "INPUT", "-p", "udp", "--dport", PORT)
            host.start()
        measured(lambda: all(host.is_up() for host in hosts), START_S, "three nodes up")
        measured(lambda: all(host.sees() == ["h1", "h2", "h3"] for host in hosts), 30, "three see each other")
        measured(lambda: all(probes(host) >= 3 for host in hosts), 60, "probes are datagrams")

        iptables(hosts[1], "-R", "INPUT", "1", "-p", "udp", "--dport", PORT, "-j", "DROP")
        end = time.monotonic() + BLOCKED_S
        while time.monotonic() < end:
            assert all(host.sees() == ["h1", "h2", "h3"] for host in hosts)
            time.sleep(0.3)
        assert 1 <= probes(hosts[1]) <= 4 * 5, "questions of two and answers of two, tried again after 1, 2, 4, 8 s"
        assert not any("suspected" in host.log() for host in hosts)

        iptables(hosts[1], "-R", "INPUT", "1", "-p", "udp", "--dport", PORT)
        hosts[1].kill()
        measured(lambda: hosts[0].sees() == hosts[2].sees() == ["h1", "h3"], 6, "a killed peer is gone")

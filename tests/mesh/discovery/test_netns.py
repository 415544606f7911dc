"""Nodes on hosts of their own, joined by real Ethernet frames. Each test prints what it measured (`pytest -s`)."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.mesh.discovery.netns import Host, ip, measured, network, why_not

pytestmark = [pytest.mark.netns, pytest.mark.timeout(300)]

START_S = 60.0
"""A node imports its libraries on a machine that may be busy."""


@pytest.fixture(autouse=True)
def namespaces() -> None:
    """Skips where there can be none."""
    if reason := why_not():
        pytest.skip(reason)


def start_all(hosts: list[Host], *flags: str) -> None:
    for host in hosts:
        host.start(*flags)
    measured(lambda: all(host.is_up() for host in hosts), START_S, f"{len(hosts)} nodes up")


def all_see(hosts: list[Host], names: str) -> bool:
    return all(host.sees() == names.split() for host in hosts)


@pytest.mark.parametrize(
    "way", [pytest.param("udp", marks=pytest.mark.extended), pytest.param("mdns", marks=pytest.mark.slow)]
)
def test_three_hosts_on_a_bridge_form_a_mesh_lose_one_and_let_one_go(tmp_path: Path, way: str) -> None:
    with network(tmp_path, 3) as (one, two, three):
        start_all([one, two, three], "--discovery", way)
        measured(lambda: all_see([one, two, three], "h1 h2 h3"), 10, f"{way}: three see each other")
        addresses = {link["address"].rpartition(":")[0] for link in one.get("/v1/topology")["links"]}
        assert not any(address.startswith("127.") for address in addresses), addresses
        assert answers(one, two)
        two.kill()
        measured(lambda: all_see([one, three], "h1 h3"), 5.5, f"{way}: killed peer gone everywhere")
        two.start("--discovery", way)
        measured(two.is_up, START_S, "started again")
        measured(lambda: all_see([one, two, three], "h1 h2 h3"), 10, f"{way}: it is back")
        two.kill(signal.SIGTERM)
        measured(lambda: all_see([one, three], "h1 h3"), 3, f"{way}: stopped peer gone")
        time.sleep(4)
        assert all_see([one, three], "h1 h3"), "no ghost comes back"


@pytest.mark.extended
def test_a_second_node_is_seen_at_once(tmp_path: Path) -> None:
    with network(tmp_path, 2) as (one, two):
        for way in ("udp", "mdns"):
            start_all([one], "--discovery", way)
            two.start("--discovery", way)
            measured(two.is_up, START_S, "the second is up")
            measured(lambda: all_see([one, two], "h1 h2"), 10, f"{way}: from up to seen by both")
            one.kill(), two.kill()


@pytest.mark.skipif(not (shutil.which("avahi-daemon") and shutil.which("dbus-daemon")), reason="avahi is missing")
def test_avahi_sees_what_a_node_registers_and_that_it_goes(tmp_path: Path) -> None:
    with network(tmp_path, 2) as (one, judge):
        browse = _avahi(judge, tmp_path)
        start_all([one], "--discovery", "mdns")
        measured(lambda: "10.77.0.1" in browse(), 20, "avahi resolves the node")
        line = next(line for line in browse().splitlines() if line.startswith("=") and "10.77.0.1" in line)
        node_id = one.get("/state")["node_id"]
        assert f"exo-mesh-{node_id[:16]}" in line and "_exo-mesh._tcp" in line and ";5000;" in line
        for text in (f'"id={node_id}"', '"ns=default"', '"name=h1"', '"proto='):
            assert text in line
        one.kill(signal.SIGTERM)
        measured(lambda: "exo-mesh-" not in browse(), 10, "avahi sees that it has gone")


def _avahi(host: Host, folder: Path):  # type: ignore[no-untyped-def]
    """An avahi-daemon on a bus of its own; answers a function that browses."""
    bus = folder / "bus"
    dbus_conf, avahi_conf = folder / "dbus.conf", folder / "avahi.conf"
    dbus_conf.write_text(
        f"<busconfig><type>system</type><listen>unix:path={bus}</listen><auth>EXTERNAL</auth>"
        '<policy context="default"><allow user="*"/><allow own="*"/><allow send_type="method_call"/>'
        '<allow send_type="signal"/><allow send_requested_reply="true" send_type="method_return"/>'
        '<allow send_requested_reply="true" send_type="error"/><allow receive_type="method_call"/>'
        '<allow receive_type="method_return"/><allow receive_type="error"/><allow receive_type="signal"/>'
        "</policy></busconfig>"
    )
    avahi_conf.write_text("[server]\nhost-name=judge\nuse-ipv6=no\nallow-interfaces=eth0\n")
    environ = {"DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={bus}", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    host.popen("dbus-daemon", f"--config-file={dbus_conf}", "--nofork", env=environ, **quiet)
    measured(bus.exists, 10, "bus")
    # a mount namespace of its own: the daemon insists on its runtime directory, which another one may be using
    daemon = (
        f"mount -t tmpfs none /run/avahi-daemon 2>/dev/null || mount -t tmpfs none /run; mkdir -p /run/avahi-daemon;\
 exec avahi-daemon -f {avahi_conf} --no-drop-root --no-chroot --no-rlimits"
    )
    host.popen("unshare", "-m", "sh", "-c", daemon, env=environ, **quiet)

    def browse() -> str:
        command = ["ip", "netns", "exec", host.ns, "timeout", "5", "avahi-browse", "-rpt", "_exo-mesh._tcp"]
        return subprocess.run(command, env=environ, check=False, capture_output=True, text=True).stdout

    return browse


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("the cable is pulled", marks=pytest.mark.slow),
        pytest.param("packets vanish", marks=pytest.mark.slow),
    ],
)
def test_a_peer_with_two_paths_stays_when_one_goes(tmp_path: Path, how: str) -> None:
    with network(tmp_path, 2, num_networks=2) as (one, two):
        start_all([one, two], "--discovery", "udp,mdns")
        measured(lambda: all_see([one, two], "h1 h2"), 10, "both see each other")
        measured(lambda: one.link().get("paths") and two.link().get("paths"), 20, "paths are measured")
        paths = {path["address"] for path in one.link()["paths"] if path["works"]}
        assert {"10.77.0.2:5000", "10.77.1.2:5000"} <= paths
        assert one.link()["rtt_ms"] > 0 and one.link()["mb_per_s"] > 0
        before = one.link()["address"]
        number = 0 if _is_on(before, 0) else 1
        port = two.port(number)
        if how == "the cable is pulled":
            ip("-n", two.net.switch, "link", "set", port, "down")
        else:
            command = ["ip", "netns", "exec", two.net.switch, "bridge", "link", "set", "dev", port, "state", "0"]
            subprocess.run(command, check=True)
        measured(lambda: _is_on(one.link().get("address", ""), 1 - number), 10, f"{how}: over to the other path")
        measured(lambda: _is_on(two.link().get("address", ""), 1 - number), 10, f"{how}: and the other side")
        time.sleep(2)
        assert all_see([one, two], "h1 h2")
        for host in (one, two):
            assert "is dead" not in host.log() and host.log().count("joined from") == 1, host.log()


def _is_on(address: str, number: int) -> bool:
    return address.startswith(f"10.77.{number}.") or f"%eth{number}]" in address


@pytest.mark.parametrize(
    "way", [pytest.param("udp", marks=pytest.mark.slow), pytest.param("mdns", marks=pytest.mark.extended)]
)
def test_an_interface_that_comes_later_is_used(tmp_path: Path, way: str) -> None:
    with network(tmp_path, 2) as (one, two):
        ip("-n", two.ns, "link", "set", "eth0", "down")
        start_all([one, two], "--discovery", way)
        assert one.sees() == ["h1"] and two.sees() == ["h2"]
        ip("-n", two.ns, "link", "set", "eth0", "up")
        measured(lambda: all_see([one, two], "h1 h2"), 15, f"{way}: from the cable to both seen")
        measured(lambda: "10.77.0.2:5000" in str(one.get("/state")["view"]), 15, "the new address is known")


@pytest.mark.extended
def test_peers_with_nothing_but_link_local_ipv6_find_each_other(tmp_path: Path) -> None:
    with network(tmp_path, 2) as (one, two):
        for host in (one, two):
            ip("-n", host.ns, "addr", "flush", "dev", "eth0", "scope", "global")
        start_all([one, two], "--discovery", "udp")
        measured(lambda: all_see([one, two], "h1 h2"), 15, "over fe80:: alone")
        assert one.link()["address"].startswith("[fe80:") and "%eth0]" in one.link()["address"]
        assert answers(one, two)


def answers(one: Host, two: Host) -> str:
    """What a model that is spread over both hosts says to a request at the second."""
    placed = one.post("/instance", {"model": "exo-mesh-demo", "min_peers": 2})
    assert "error" not in placed, placed
    message = {"role": "user", "content": "Count from 7 to 20."}
    reply = two.post("/v1/chat/completions", {"model": "exo-mesh-demo", "messages": [message], "max_tokens": 8})
    assert reply["usage"]["completion_tokens"] == 8, reply
    return str(reply["choices"][0]["message"])


@pytest.mark.slow
def test_five_that_start_together_agree(tmp_path: Path) -> None:
    with network(tmp_path, 5) as hosts:
        for host in hosts:
            host.start()
        measured(lambda: all(host.is_up() for host in hosts), 2 * START_S, "five nodes up")

        def agreed() -> bool:
            views = [(host.get("/state") or {}).get("view", {}) for host in hosts]
            digests = {view.get("view_digest") for view in views}
            return len(digests) == 1 and all(len(view.get("peers", ())) == 5 for view in views)

        measured(agreed, 10, "five agree on one view_digest")
        hosts[2].kill()
        rest = [*hosts[:2], *hosts[3:]]
        measured(lambda: all_see(rest, "h1 h2 h4 h5"), 5.5, "killed peer gone from all four")


@pytest.mark.slow
def test_twenty_restarts_leave_no_ghost(tmp_path: Path) -> None:
    with network(tmp_path, 2) as (one, two):
        start_all([one, two])
        for turn in range(20):
            measured(lambda: all_see([one, two], "h1 h2"), 15, f"restart {turn}")
            two.kill(signal.SIGKILL if turn % 2 else signal.SIGTERM)
            assert two.node is not None
            two.node.wait()
            two.start()
            measured(two.is_up, START_S, "up")
        measured(lambda: all_see([one, two], "h1 h2"), 15, "the last one")
        two.kill()
        measured(lambda: one.sees() == ["h1"], 5.5, "gone")
        time.sleep(6)
        assert one.sees() == ["h1"]


@pytest.mark.slow
def test_random_datagrams_leave_memory_flat_and_the_log_quiet(tmp_path: Path) -> None:
    with network(tmp_path, 2) as (one, two):
        start_all([one])
        assert one.node is not None
        process = psutil.Process(one.node.pid)
        rng = random.Random(1)
        _flood(two, rng.randrange(2**32), 2_000)
        before, lines = process.memory_info().rss, one.log().count("\n")
        _flood(two, rng.randrange(2**32), 30_000)
        assert one.is_up()
        grown_mb = (process.memory_info().rss - before) / 1e6
        print(f"30 000 datagrams: memory {grown_mb:+.1f} MB, {one.log().count(chr(10)) - lines} lines in the log")
        assert grown_mb < 20
        assert one.log().count("\n") - lines <= 3, one.log()
        assert one.sees() == ["h1"]


_FLOOD = """
import json, random, socket, sys, time
rng = random.Random(int(sys.argv[1])); s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for n in range(int(sys.argv[2])):
    kind = n % 4
    if kind == 0: data = rng.randbytes(rng.randrange(1400))
    elif kind == 1: data = b'{"mesh":"exo-mesh"' + rng.randbytes(50)
    elif kind == 2: data = json.dumps({"mesh": "exo-mesh", "v": 1, "ns": "other", "id": str(n), "port": 9}).encode()
    else: data = json.dumps({"mesh": "exo-mesh", "v": 1, "ns": "default", "id": str(n), "port": 1 + n % 65535}).encode()
    s.sendto(data, ("10.77.0.1", 5678 if n % 3 else 5353))
    if n % 50 == 0: time.sleep(0.005)
"""


def _flood(host: Host, seed: int, count: int) -> None:
    """Noise, halves of announcements, strangers, and announcements of peers that are not there."""
    import sys

    assert host.popen(sys.executable, "-S", "-c", _FLOOD, str(seed), str(count)).wait(120) == 0

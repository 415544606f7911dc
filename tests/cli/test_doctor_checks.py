"""What the doctor concludes: readings in, findings out."""

from __future__ import annotations

from typing import Any

import pytest

from exo_mesh.cli.doctor import checks
from exo_mesh.cli.doctor.checks import (
    ClockReading,
    DirectoryReading,
    EchoReading,
    Finding,
    FirewallReading,
    PortReading,
    ServiceReading,
)

GB = 10**9


def levels(findings: list[Finding]) -> list[str]:
    return [str(finding.level) for finding in findings]


def one(findings: list[Finding]) -> Finding:
    assert len(findings) == 1
    return findings[0]


@pytest.mark.parametrize(
    ("python", "grpcio", "level", "text"),
    [
        ((3, 11, 2), "1.76", "ok", "exo-mesh 0.1.0, protocol 1, Python 3.11.2, grpcio 1.76, numpy 2.0"),
        ((3, 14, 0), "1.76", "ok", "Python 3.14.0"),
        ((3, 10, 9), "1.76", "fail", "Python 3.10.9 is too old"),
        ((3, 12, 0), None, "fail", "not installed: grpcio"),
    ],
)
def test_versions(python: tuple[int, ...], grpcio: str | None, level: str, text: str) -> None:
    found = one(checks.check_versions(python, "0.1.0", 1, {"grpcio": grpcio, "numpy": "2.0"}))
    assert (found.level, text in found.text) == (level, True)
    assert bool(found.remedy) == (level == "fail")


def test_a_library_that_is_too_old_is_a_failure_with_the_command() -> None:
    found = one(checks.check_versions((3, 11, 2), "0.1.0", 1, {"grpcio": "1.40"}, "grpcio 1.40 is too old"))
    assert (found.level, found.text, found.remedy) == (
        "fail", "grpcio 1.40 is too old", "pip install --upgrade exo-mesh",
    )  # fmt: skip


def engine(name: str, available: bool, chosen: bool = False) -> dict[str, Any]:
    reason, remedy = ("it runs", "") if available else ("not importable", f"pip install {name}")
    return {"name": name, "kind": "stage", "version": "1", "available": available, "chosen": chosen,
            "reason": reason, "remedy": remedy}  # fmt: skip


@pytest.mark.parametrize(
    ("engines", "preference", "expected"),
    [
        ([engine("mlx", True, True), engine("dummy", True)], "auto", ["ok"]),
        ([engine("mlx", True, True), engine("torch", False)], "auto", ["ok", "note"]),
        ([engine("dummy", True)], "auto", ["warn"]),
        ([engine("mlx", False)], "auto", ["warn", "note"]),
        ([engine("mlx", True, True), engine("dummy", True)], "dummy", ["ok"]),
        ([engine("mlx", False)], "mlx", ["fail"]),
        ([engine("mlx", True, True)], "torch", ["fail"]),
        ([], "auto", ["warn"]),
    ],
)
def test_engines(engines: list[dict[str, Any]], preference: str, expected: list[str]) -> None:
    found = checks.check_engines(engines, preference)
    assert levels(found) == expected
    assert all(finding.remedy for finding in found if finding.level != "ok")
    assert all(e["remedy"] in found[1].text for e in engines if not e["available"] and len(found) > 1)


@pytest.mark.parametrize(
    ("reading", "level", "text"),
    [
        (PortReading("api", 52415), "ok", "API port 52415 is free"),
        (PortReading("api", 0), "ok", "API port: any free one"),
        (PortReading("api", 52415, "nginx (pid 7)"), "warn", "a node would use the next free one"),
        (PortReading("api", 80, "nginx (pid 7)", asked_for=True), "fail", "API port 80 is taken by nginx (pid 7)"),
        (PortReading("api", 52415, "python (pid 7)", ours=True), "ok", "held by the node that runs here"),
        (PortReading("grpc", 5000, "AirPlay (pid 7)", asked_for=True), "warn", "next free one"),
        (PortReading("udp", 5678, "another program"), "fail", "UDP port of announcements 5678 is taken"),
        (PortReading("udp", 5678), "ok", "can be opened"),
        (PortReading("probes", 5000), "ok", "UDP port of probes 5000 is free"),
        (PortReading("probes", 5000, "python (pid 7)", ours=True), "ok", "held by the node that runs here"),
        (PortReading("probes", 5000, "other (pid 7)"), "warn", "peers would call instead"),
    ],
)
def test_ports(reading: PortReading, level: str, text: str) -> None:
    found = one(checks.check_ports([reading]))
    assert (found.level, text in found.text) == (level, True), found


@pytest.mark.parametrize(
    ("wanted", "taken", "node_runs", "level"),
    [
        (None, [], False, "ok"),
        ((7000, 7003), [], False, "ok"),
        ((7000, 7003), [7001], False, "warn"),
        ((7000, 7003), [7001], True, "ok"),
        ((7000, 7003), [7000, 7001, 7002, 7003], False, "fail"),
        ((7000, 7003), [7000, 7001, 7002, 7003], True, "warn"),
    ],
)
def test_data_ports(wanted: tuple[int, int] | None, taken: list[int], node_runs: bool, level: str) -> None:
    assert levels(checks.check_data_ports(wanted, taken, node_runs)) == [level]


HEARD = EchoReading("lo", "127.255.255.255", True)
DEAF = EchoReading("eth0", "10.0.0.255", False)
BARRED = EchoReading("wlan0", "10.1.0.255", False, "Operation not permitted")


@pytest.mark.parametrize(
    ("readings", "used", "alone", "level", "text"),
    [
        ([HEARD], True, True, "ok", "works on lo"),
        ([HEARD, DEAF], True, True, "warn", "eth0 to 10.0.0.255: sent, but not received"),
        ([BARRED], True, True, "fail", "wlan0 to 10.1.0.255: Operation not permitted"),
        ([BARRED], True, False, "warn", "Operation not permitted"),
        ([DEAF], False, True, "ok", "(not used by --discovery)"),
        ([], True, True, "fail", "there is no network interface"),
    ],
)
def test_echoes(readings: list[EchoReading], used: bool, alone: bool, level: str, text: str) -> None:
    found = one(checks.check_echo("broadcast", readings, used, alone))
    assert (found.level, text in found.text) == (level, True), found
    assert ("--bootstrap-peers" in found.remedy) == (level != "ok")


OPEN_RULES = "table inet filter {\n chain input {\n type filter hook input priority filter; policy accept;\n }\n}"
CLOSED_RULES = OPEN_RULES.replace("policy accept", "policy drop")
CLOSED_FORWARDING = OPEN_RULES + "\ntable ip t { chain f { type filter hook forward priority 0; policy drop; } }"


@pytest.mark.parametrize(
    ("ruleset", "drops"), [("", False), (OPEN_RULES, False), (CLOSED_RULES, True), (CLOSED_FORWARDING, False)]
)
def test_nftables_rules_are_read(ruleset: str, drops: bool) -> None:
    assert checks.nft_drops(ruleset) == drops


@pytest.mark.parametrize(
    ("reading", "level", "text", "remedy"),
    [
        (FirewallReading("Linux"), "ok", "no firewall found", ""),
        (FirewallReading("Linux", nft="open"), "ok", "no firewall found", ""),
        (FirewallReading("Linux", nft="unreadable"), "ok", "only root", "run exo-mesh doctor as root"),
        (
            FirewallReading("Linux", ufw_active=True, nft="drops"),
            "warn",
            "ufw is active",
            "ufw allow 52415/tcp && ufw allow 5000/tcp && ufw allow 5678/udp; set --data-ports A-B",
        ),
        (FirewallReading("Linux", firewalld_runs=True), "warn", "firewalld runs", "--add-port=5678/udp"),
        (FirewallReading("Linux", nft="drops"), "warn", "drops packets that no rule accepts", "52415/tcp, 5000/tcp"),
        (FirewallReading("Darwin"), "ok", "macOS asks once", "Local Network"),
    ],
)
def test_firewalls(reading: FirewallReading, level: str, text: str, remedy: str) -> None:
    found = one(checks.check_firewall(reading, [52415, 5000], [5678], any_port=True))
    assert (found.level, text in found.text, remedy in found.remedy) == (level, True, True), found


@pytest.mark.parametrize(
    ("offset_s", "error_s", "level"),
    [(0.0, 0.5, "ok"), (5.4, 0.5, "ok"), (5.6, 0.5, "warn"), (-3600.0, 0.5, "warn"), (8.0, 4.0, "ok")],
)
def test_clocks(offset_s: float, error_s: float, level: str) -> None:
    found = one(checks.check_clock([ClockReading("beta", offset_s, error_s)], 1))
    assert found.level == level
    assert "beta" in found.text


def test_clocks_that_nobody_told() -> None:
    assert one(checks.check_clock([], 0)).text == "no other peer to compare with"
    assert one(checks.check_clock([], 2)).text == "none of 2 other peers answered"


@pytest.mark.parametrize(
    ("usable", "reserved", "max_memory", "level", "text"),
    [
        (13 * GB, 0, None, "ok", "1.0 GB stays free for the system"),
        (12 * GB, 0, 12 * GB, "ok", "--max-memory is 12.0 GB"),
        (13 * GB, 0, 64 * GB, "ok", "1.0 GB stays free for the system"),
        (GB // 2, 0, None, "warn", "free for the system"),
        (GB // 2, 0, GB // 2, "warn", "--max-memory is 500.0 MB"),
        (0, 12 * GB, 12 * GB, "ok", "--max-memory is 12.0 GB, loaded models hold 12.0 GB"),
    ],
)
def test_memory(usable: int, reserved: int, max_memory: int | None, level: str, text: str) -> None:
    found = one(checks.check_memory(16 * GB, 14 * GB, usable, reserved, max_memory))
    assert (found.level, text in found.text) == (level, True), found
    assert "14.0 GB of 16.0 GB are available" in found.text
    assert ("raise --max-memory" in found.remedy) == (level == "warn" and max_memory is not None)


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (DirectoryReading("home", "/h", True, free_bytes=50 * GB), ["ok"]),
        (DirectoryReading("home", "/h", False, free_bytes=50 * GB), ["ok"]),
        (DirectoryReading("home", "/h", True, free_bytes=GB // 2), ["warn"]),
        (DirectoryReading("home", "/h", True, error="Permission denied"), ["fail"]),
        (DirectoryReading("models directory", "/m", True, error="Permission denied"), ["warn"]),
        (DirectoryReading("models directory", "/m", False, must_exist=True), ["warn"]),
        (DirectoryReading("models directory", "/m", False), []),
    ],
)
def test_directories(reading: DirectoryReading, expected: list[str]) -> None:
    found = checks.check_directories([reading])
    assert levels(found) == expected
    assert all(reading.path in finding.text for finding in found)


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ({}, ["warn"]),
        ({"a": ""}, ["ok"]),
        ({"a": "", "b": "config.json: no architectures"}, ["ok", "warn"]),
        ({"b": "config.json: no architectures"}, ["warn"]),
        ({f"m{i}": "" for i in range(100)}, ["ok"]),
    ],
)
def test_models(models: dict[str, str], expected: list[str]) -> None:
    found = checks.check_models(models)
    assert levels(found) == expected
    assert all(len(finding.text) < 200 for finding in found)


def state(*names: str, reasons: tuple[dict[str, str], ...] = ()) -> dict[str, Any]:
    peers = [{"id": name, "name": name, "alive": True, "version": "0.1.0"} for name in names]
    return {"node_id": names[0], "view": {"peers": peers}, "health": {"reasons": list(reasons)}}


def test_peers() -> None:
    assert "no node answers at http://x" in one(checks.check_peers(None, "http://x", "")).text
    assert one(checks.check_peers(None, "http://x", "it said 401")).level == "warn"
    assert one(checks.check_peers(state("alpha"), "", "")).text == "this node is alone"
    assert one(checks.check_peers(state("alpha", "beta"), "", "")).text == "this node sees 1 other: beta"
    mixed = state("alpha", "beta")
    mixed["view"]["peers"][1]["version"] = "0.2.0"
    assert "exo-mesh 0.1.0, other peers differ: beta 0.2.0" in checks.check_peers(mixed, "", "")[1].text
    refused = {"code": "peer_refused", "message": "gamma: protocol 2 is not 1", "remedy": "one version"}
    found = checks.check_peers(state("alpha", reasons=(refused,)), "", "")
    assert levels(found) == ["ok", "warn"]
    assert (found[1].text, found[1].remedy) == ("gamma: protocol 2 is not 1", "one version")


def test_what_other_peers_and_instances_say_of_themselves() -> None:
    assert checks.check_health(None) == []
    mesh = state("alpha", "beta")
    full = {"code": "disk_full", "level": "degraded", "message": "2 MB are free", "remedy": "make room"}
    note = {"code": "loading", "level": "ok", "message": "is being loaded", "remedy": ""}
    mesh["health"] |= {
        "peer_health": [{"id": name, "name": name, "reasons": [full]} for name in ("alpha", "beta")],
        "instance_health": [{"id": "m-1", "reasons": [note]}],
    }
    found = one(checks.check_health(mesh))
    assert (found.level, found.text, found.remedy) == ("warn", "beta: 2 MB are free", "make room"), (
        "alpha's own are told"
    )
    mesh["health"]["peer_health"] = []
    assert one(checks.check_health(mesh)).level == "ok"


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (ServiceReading(), []),
        (ServiceReading("active"), ["ok"]),
        (ServiceReading("inactive", "/usr/sbin/nginx"), ["ok", "ok"]),
        (ServiceReading("failed"), ["warn"]),
    ],
)
def test_services(reading: ServiceReading, expected: list[str]) -> None:
    assert levels(checks.check_services(reading)) == expected

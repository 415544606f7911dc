"""The doctor on this machine: loopback only, with and without a node."""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import ChildNode, client_of
from exo_mesh.cli.doctor import readings
from exo_mesh.cli.doctor.checks import Finding, Severity
from exo_mesh.cli.doctor.diagnosis import diagnose
from exo_mesh.cli.main import main
from exo_mesh.cli.verbs.doctor import report
from tests.cli.closed_port import closed_port
from tests.support.processes import QUIET_FLAGS, clean_environ, eventually

ON_LOOPBACK = ["--host", "127.0.0.1", "--listen-port", "0", "--engine", "dummy"]


def examine(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Exit code and findings by check."""
    code = main(["doctor", "--json", *flags])
    findings = json.loads(capsys.readouterr().out)
    assert findings["ok"] == (code == exit_codes.OK)
    by_check: dict[str, list[dict[str, str]]] = {}
    for finding in findings["findings"]:
        by_check.setdefault(finding["check"], []).append(finding)
    return code, by_check


def test_a_sound_machine_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ports = ["--api-port", str(closed_port()), "--grpc-port", str(closed_port())]
    code, found = examine(capsys, "--home", str(tmp_path), *ports, *ON_LOOPBACK)
    assert code == exit_codes.OK, found
    expected = ["versions", "config", "engines", "ports", "broadcast", "multicast"]
    expected += ["firewall", "clock", "memory", "disk", "models", "peers", "power"]
    assert [name for name in found if name != "services"] == expected
    assert found["engines"][0]["finding"].startswith("dummy ")
    assert "exo-mesh-demo" in found["models"][0]["finding"]
    assert "no node answers at http://127.0.0.1:" in found["peers"][0]["finding"]


def test_people_get_a_line_each_and_a_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--home", str(tmp_path), "--api-port", str(closed_port()), *ON_LOOPBACK])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    versions   exo-mesh ")
    assert lines[-1].endswith(" warnings")


def test_what_is_broken_fails_with_what_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        (tmp_path / "models" / "broken").mkdir(parents=True)
        (tmp_path / "models" / "broken" / "config.json").write_text("{")
        code, found = examine(
            capsys, "--home", str(tmp_path), *ON_LOOPBACK, "--engine", "nope", "--api-port", str(port)
        )
    assert code == exit_codes.FAILED
    assert found["engines"][0]["level"] == "fail"
    assert found["ports"][0]["level"] == "fail"
    assert f"API port {port} is taken by " in found["ports"][0]["finding"]
    assert "--api-port" in found["ports"][0]["remedy"]
    assert any(item["level"] == "warn" and "broken: " in item["finding"] for item in found["models"])


def test_a_taken_udp_port_of_probes_is_a_warning_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = closed_port()  # no other process gets it, neither by TCP nor by UDP
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", port))
        flags = ["--home", str(tmp_path), *ON_LOOPBACK, "--api-port", str(closed_port()), "--grpc-port", str(port)]
        _, found = examine(capsys, *flags)
        _, off = examine(capsys, *flags, "--no-probe-datagrams")
    taken = next(item for item in found["ports"] if "UDP port of probes" in item["finding"])
    assert taken["level"] == "warn"
    assert f"UDP port of probes {port} is taken by " in taken["finding"]
    assert "--no-probe-datagrams" in taken["remedy"]
    assert not any("probes" in item["finding"] for item in off["ports"])


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_home_that_cannot_be_used_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = examine(capsys, "--home", "/proc/x", "--api-port", str(closed_port()), *ON_LOOPBACK)
    assert code == exit_codes.FAILED
    assert any(item["level"] == "fail" and "home /proc/x" in item["finding"] for item in found["disk"])


def test_wrong_settings_are_refused_as_by_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--api-port", "x"]) == exit_codes.USAGE


def names_with_api(url: str) -> list[str]:
    """The peers whose API this node knows."""
    return [peer["name"] for peer in ApiClient(url).get("/state")["view"]["peers"] if peer["api_url"]]


@pytest.mark.extended
def test_a_running_node_is_recognised_and_tells_of_its_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = ChildNode(["--name", "alpha", "--api-port", "0", *QUIET_FLAGS], tmp_path / "a" / "log",
                      clean_environ(tmp_path / "a"))  # fmt: skip
    try:
        told = first.wait_ready(60)
        flags = ["--name", "beta", "--api-port", "0", *QUIET_FLAGS, "--wait-for-peers", "1"]
        flags += ["--bootstrap-peers", told["grpc_address"]]
        second = ChildNode(flags, tmp_path / "b" / "log", clean_environ(tmp_path / "b"))
        try:
            other = client_of(second.wait_ready(60))
            assert eventually(lambda: "beta" in names_with_api(told["api_url"])), second.log_tail(40)
            assert eventually(lambda: other.get("/state")["health"]["status"] == "ok"), second.log_tail(40)
            assert other.get("/readyz")["ready"]
            ports = ["--api-port", told["api_url"].rpartition(":")[2]]
            ports += ["--grpc-port", told["grpc_address"].rpartition(":")[2]]
            code, found = examine(capsys, "--home", str(tmp_path / "a"), *ON_LOOPBACK, *ports)
        finally:
            second.stop()
    finally:
        first.stop()
    assert code == exit_codes.OK, found
    assert all(item["finding"].endswith("held by the node that runs here") for item in found["ports"][:2])
    assert found["peers"][0]["finding"] == "this node sees 1 other: beta"
    assert found["clock"][0]["finding"] == "agrees with beta"


def test_a_check_that_hangs_or_breaks_does_not_hold_up_the_others() -> None:
    never = threading.Event()

    def hang() -> list[Finding]:
        never.wait()
        return []

    def break_down() -> list[Finding]:
        raise PermissionError(13, "Permission denied", "/proc/x")

    fine = Finding("fine", Severity.OK, "all is well")
    found = diagnose({"hang": hang, "break": break_down, "fine": lambda: [fine]}, 0.2)
    never.set()
    assert [(item.check, item.level) for item in found] == [("hang", "warn"), ("break", "warn"), ("fine", "ok")]
    assert "no answer within 0.2 s" in found[0].text
    assert "Permission denied" in found[1].text
    assert report(found).endswith("0 failed, 2 warnings")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a broadcast address on loopback")
def test_our_own_datagrams_come_back_on_loopback() -> None:
    assert [reading.target for reading in readings.read_broadcast("127.0.0.1")] == ["127.255.255.255"]
    assert all(reading.heard for reading in readings.read_broadcast("127.0.0.1"))
    assert all(reading.heard for reading in readings.read_multicast("127.0.0.1"))


def test_an_interface_that_is_not_there_is_an_error_and_not_silence() -> None:
    reading = readings.broadcast_echo("gone0", "192.0.2.1", "127.255.255.255")
    assert (reading.heard, reading.error != "") == (False, True)


def test_ports_in_use_are_seen_as_a_node_would_see_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert readings.taken_ports("127.0.0.1", (port, port)) == [port]
        assert readings.port_holder("127.0.0.1", port, socket.SOCK_STREAM) != ""
    assert readings.taken_ports("127.0.0.1", (port, port)) == []
    assert readings.taken_ports("127.0.0.1", None) == []

"""`exo-mesh doctor rdma`: cables, ports, what is missing; and that a node tells the mesh what the tools say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exo_mesh.cli.doctor.checks import Severity
from exo_mesh.cli.doctor.rdma import check_rdma
from exo_mesh.cli.main import main
from exo_mesh.cli.topology_picture import picture
from exo_mesh.domain.device import RdmaPort
from exo_mesh.domain.fast_synch import resolve
from exo_mesh.domain.reports import StateReport
from exo_mesh.domain.thunderbolt import ThunderboltReading
from exo_mesh.machine.thunderbolt_readings import TOOLS, read_thunderbolt
from exo_mesh.node import housekeeping
from exo_mesh.node.node import Node
from exo_mesh.rings.placing.spec import InstanceSpec
from tests.domain.test_thunderbolt import READING, words
from tests.support.nodes import MODEL, a_request, instances, mesh, tokens, until
from tests.support.processes import clean_environ
from tests.support.reports import reply_of

UNSET = resolve("auto", {})


def told(reading: ThunderboltReading, state: dict[str, Any] | None = None, jaccl: bool | None = True) -> dict[str, Any]:
    """The last finding of each check, and the levels of all."""
    findings = check_rdma(reading, state, UNSET, jaccl)
    return {f.check: f for f in findings}


def test_a_mac_with_one_cable_is_told_port_by_port() -> None:
    findings = check_rdma(READING, None, UNSET, True)
    ports = [finding.text for finding in findings if finding.check == "port"]
    assert ports == [
        "port 1 (en2, rdma_en2): PORT_ACTIVE, cable to mini-b, 80 Gb/s",
        "port 2 (en3, rdma_en3): PORT_DOWN, a device that is not a Mac, 40 Gb/s",
        "port 3 (en4, rdma_en4): PORT_DOWN, no cable, Up to 120 Gb/s",
    ]
    assert told(READING)["macos"].text == "macOS 26.4.1 (build 25E253)"
    assert not [finding for finding in findings if finding.level is Severity.FAIL]
    assert told(READING)["bridge"].level is Severity.WARN


def test_the_limits_of_queue_pairs_are_shown_before_a_group_needs_them() -> None:
    assert "queue pairs: rdma_en2 10, rdma_en3 10." in told(READING)["queues"].text
    assert "assuming 10 per device" in told(replace(READING, ibv_limits=""))["queues"].text


def test_a_mac_with_thunderbolt_4_is_told_that_there_is_no_rdma_on_it() -> None:
    older = READING.thunderbolt.replace("80 Gb/s", "40 Gb/s").replace("120 Gb/s", "40 Gb/s")
    finding = told(replace(READING, ibv_devices="", thunderbolt=older))["devices"]
    assert finding.level is Severity.FAIL and "older than Thunderbolt 5" in finding.text


@pytest.mark.parametrize(
    ("reading", "jaccl", "check", "words"),
    [
        (replace(READING, rdma_ctl="disabled"), True, "rdma_ctl", "rdma_ctl enable"),
        (replace(READING, sw_vers="ProductVersion: 15.7\n"), True, "macos", "26.2"),
        (replace(READING, ibv_devices=""), True, "devices", "rdma_ctl enable"),
        (READING, False, "mlx", "--group-backend ring"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(
    reading: ThunderboltReading, jaccl: bool, check: str, words: str
) -> None:
    finding = told(reading, jaccl=jaccl)[check]
    assert finding.level is Severity.FAIL and words in finding.remedy


def test_a_cable_whose_other_end_has_no_rdma_is_a_warning() -> None:
    down = READING.ibv_devinfo.replace("PORT_ACTIVE (4)", "PORT_DOWN (1)")
    (port, *_) = [f for f in check_rdma(replace(READING, ibv_devinfo=down), None, UNSET, True) if f.check == "port"]
    assert port.level is Severity.WARN and "the Macs at both ends" in port.remedy
    old = READING.thunderbolt.replace('"80 Gb/s"', '"40 Gb/s"')
    (port, *_) = [
        f
        for f in check_rdma(replace(READING, ibv_devinfo=down, thunderbolt=old), None, UNSET, True)
        if f.check == "port"
    ]
    assert "Thunderbolt 5 cable" in port.remedy


def test_elsewhere_it_says_that_this_is_no_mac() -> None:
    findings = check_rdma(ThunderboltReading(), None, UNSET, None)
    assert [finding.check for finding in findings] == ["macos", "synch"]
    assert "--group-backend ring" in findings[0].remedy


@pytest.fixture
def shims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tools of macOS as programs that print what they are told to."""
    folder = tmp_path / "bin"
    folder.mkdir()
    texts = {name: getattr(READING, name) for name in TOOLS}
    for name, (program, *flags) in TOOLS.items():
        file = f"{folder}/{program}"
        Path(f"{file}{'-v' if flags == ['-v'] else ''}.txt").write_text(texts[name])
        Path(file).write_text(f'#!/bin/sh\n[ ! -f "{file}$1.txt" ] || exec cat "{file}$1.txt"\ncat "{file}.txt"\n')
        Path(file).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_the_tools_are_asked_and_one_that_fails_has_nothing_to_say(shims: Path) -> None:
    assert read_thunderbolt() == READING
    (shims / "rdma_ctl").write_text("#!/bin/sh\nexit 1\n")
    (shims / "ibv_devices").unlink()
    assert read_thunderbolt() == replace(READING, rdma_ctl="", ibv_devices="")


def test_the_command_prints_the_table_and_changes_nothing(
    shims: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in clean_environ(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    before = {path: path.read_bytes() for path in shims.iterdir()}
    main(["doctor", "rdma", "--json", "--home", str(tmp_path / "home"), "--api-url", "http://127.0.0.1:9"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {"macos", "rdma_ctl", "devices", "port", "mlx", "synch", "mesh"} <= {
        finding["check"] for finding in findings
    }
    assert {path: path.read_bytes() for path in shims.iterdir()} == before and not (tmp_path / "home").exists()


async def test_a_cable_that_is_pulled_is_seen_by_all(
    shims: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "CABLES_EVERY_S", 0.2)
    async with mesh(tmp_path, 2) as nodes:
        await until(lambda: all(len(peer.rdma_ports) == 3 for peer in nodes[1].membership.view.peers()))
        (shims / "ibv_devinfo.txt").write_text(words("ibv_devinfo.txt").replace("PORT_ACTIVE (4)", "PORT_DOWN (1)"))
        await until(lambda: not any(p.active for peer in nodes[1].membership.view.peers() for p in peer.rdma_ports))


@pytest.mark.extended
async def test_a_group_over_rdma_follows_its_cable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes say that a cable joins them, as two Macs would. The engine has no collectives, so no RDMA is needed."""

    def plug(nodes: list[Node], *, active: bool) -> None:
        for own, other in ((0, 1), (1, 0)):
            port = RdmaPort(f"rdma_en{own}", active, f"domain-{own}", f"domain-{other}", "80 Gb/s")
            nodes[own].membership.describe(replace(nodes[own].membership.own, rdma_ports=(port,)))

    async with mesh(tmp_path, 2) as nodes:
        plug(nodes, active=True)
        await until(lambda: all(any(c.up for c in node.observation.topology().cables) for node in nodes))
        instance = await nodes[0].instances.create(InstanceSpec(MODEL, tensor_group=2))
        assert instance.stages[0].group.backend == "jaccl"
        devices = {device for row in instance.stages[0].group.rdma for device in row if device}
        assert devices == {"rdma_en0", "rdma_en1"}
        expected = await tokens(nodes[1], a_request())
        plug(nodes, active=False)
        await until(lambda: not any(i.state == "ready" for node in nodes for i in instances(node)))
        assert await tokens(nodes[1], a_request()) == expected, "what comes next is planned without the cable"
        assert all(not stage.group for i in instances(nodes[0]) for stage in i.stages)


def test_cables_are_in_the_picture() -> None:
    ends = [{"peer": "1", "device": "rdma_en2", "active": True}, {"peer": "2", "device": "rdma_en5", "active": True}]
    peers = [{"id": "1", "name": "mini-a"}, {"id": "2", "name": "mini-b"}]
    cables = [{"ends": ends, "up": True, "speed": "80 Gb/s", "transport": "rdma"}]
    state = reply_of(StateReport, view={"peers": peers}, cables=cables)
    from rich.console import Console

    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(picture(state))
    text = console.export_text()
    assert "mini-a" in text and "rdma_en2" in text and "80 Gb/s" in text and "up" in text
    assert "cable" in {f.check for f in check_rdma(READING, state, UNSET, True)}

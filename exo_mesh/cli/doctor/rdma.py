"""Turns readings about RDMA over Thunderbolt into the findings of `exo-mesh doctor rdma`. Reads nothing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from exo_mesh.cli.doctor.checks import Finding, Severity
from exo_mesh.domain.fast_synch import FastSynch
from exo_mesh.domain.rdma_links import MAX_QUEUE_PAIRS
from exo_mesh.domain.thunderbolt import (
    ACTIVE,
    BRIDGE,
    Bus,
    ThunderboltReading,
    device_of,
    is_new_enough,
    parse_hardware_ports,
    parse_ibv_devices,
    parse_ibv_devinfo,
    parse_max_queue_pairs,
    parse_rdma_ctl,
    parse_sw_vers,
    parse_thunderbolt,
)

TB5_GIGABITS = 80
_TOO_OLD = "the ports of this Mac are older than Thunderbolt 5, which RDMA needs"
_ENABLE = "start into macOS Recovery, open Utilities > Terminal, run `rdma_ctl enable`, and restart"


def check_rdma(
    reading: ThunderboltReading, state: Mapping[str, Any] | None, fast_synch: FastSynch, jaccl: bool | None
) -> list[Finding]:
    """Checks all that RDMA needs. state: GET /state of the node on this machine, or None. jaccl: whether the installed
    MLX has that backend, None if unknown."""
    if not reading.sw_vers:
        return [
            Finding(
                "macos",
                Severity.WARN,
                "this machine is not a Mac, which RDMA over Thunderbolt needs",
                "tensor groups over TCP work on any machine with MLX: --group-backend ring",
            ),
            _fast_synch(fast_synch),
        ]
    buses = parse_thunderbolt(reading.thunderbolt)
    return [
        _macos(reading),
        _enabled(reading),
        *_devices(reading, buses),
        *_ports(reading, buses),
        *_bridge(reading),
        _mlx(jaccl),
        _fast_synch(fast_synch),
        *_groups(state),
    ]


def _macos(reading: ThunderboltReading) -> Finding:
    version, build = parse_sw_vers(reading.sw_vers)
    text = f"macOS {version or 'of unknown version'} (build {build or 'unknown'})"
    if is_new_enough(version):
        return Finding("macos", Severity.OK, text)
    return Finding("macos", Severity.FAIL, f"{text} has no RDMA over Thunderbolt", "update to macOS 26.2 or later")


def _enabled(reading: ThunderboltReading) -> Finding:
    enabled = parse_rdma_ctl(reading.rdma_ctl)
    if enabled:
        return Finding("rdma_ctl", Severity.OK, "RDMA is enabled")
    if enabled is False:
        return Finding("rdma_ctl", Severity.FAIL, "RDMA is disabled", _ENABLE)
    return Finding("rdma_ctl", Severity.WARN, "rdma_ctl status does not show whether RDMA is enabled", _ENABLE)


def _devices(reading: ThunderboltReading, buses: Sequence[Bus]) -> list[Finding]:
    devices = parse_ibv_devices(reading.ibv_devices)
    if devices:
        found = Finding("devices", Severity.OK, f"ibv_devices lists {', '.join(devices)}")
        return [found, _queue_pairs(devices, parse_max_queue_pairs(reading.ibv_limits))]
    if buses and max(bus.gigabits for bus in buses) < TB5_GIGABITS:
        return [Finding("devices", Severity.FAIL, _TOO_OLD)]
    return [Finding("devices", Severity.FAIL, "ibv_devices lists no RDMA device", _ENABLE)]


def _queue_pairs(devices: Sequence[str], limits: Mapping[str, int]) -> Finding:
    known = ", ".join(f"{device} {limits[device]}" for device in devices if device in limits)
    text = known or f"macOS does not report how many; assuming {MAX_QUEUE_PAIRS} per device"
    return Finding("queues", Severity.OK, f"queue pairs: {text}. Each tensor group uses one for each other rank")


def _ports(reading: ThunderboltReading, buses: Sequence[Bus]) -> list[Finding]:
    """One finding for each receptacle: interface, device, state, and the Mac at the other end."""
    interfaces, states = parse_hardware_ports(reading.hardware_ports), parse_ibv_devinfo(reading.ibv_devinfo)
    findings = []
    for bus in buses:
        interface, device = device_of(bus, interfaces)
        state = states.get(device, "no RDMA")
        other = " and ".join(name or uuid[:8] for uuid, name in bus.others)
        end = f"cable to {other}" if other else "a device that is not a Mac" if bus.connected else "no cable"
        text = f"port {bus.receptacle} ({interface or '?'}, {device or '?'}): {state}, {end}, {bus.speed or 'no speed'}"
        findings.append(_port_finding(text, bus, state))
    return findings or [Finding("ports", Severity.WARN, "system_profiler lists no Thunderbolt port")]


def _port_finding(text: str, bus: Bus, state: str) -> Finding:
    if not bus.others or state == ACTIVE:
        return Finding("port", Severity.OK, text)
    if bus.gigabits < TB5_GIGABITS:
        return Finding("port", Severity.WARN, text, "RDMA needs Thunderbolt 5 ports and a Thunderbolt 5 cable")
    return Finding(
        "port", Severity.WARN, text, f"a port becomes active when RDMA is enabled on the Macs at both ends: {_ENABLE}"
    )


def _bridge(reading: ThunderboltReading) -> list[Finding]:
    if BRIDGE not in parse_hardware_ports(reading.hardware_ports):
        return []
    return [
        Finding(
            "bridge",
            Severity.WARN,
            "a Thunderbolt Bridge exists: if cables form a loop, packets may circulate in it without end",
            "if a Mac has cables to more than one other Mac, remove the bridge in System Settings > Network",
        )
    ]


def _mlx(jaccl: bool | None) -> Finding:
    if jaccl is None:
        return Finding("mlx", Severity.WARN, "the backends of MLX could not be read", "pip install exo-mesh[mlx]")
    if jaccl:
        return Finding("mlx", Severity.OK, "the installed MLX has the jaccl backend")
    remedy = "update MLX and macOS; until then --group-backend ring uses TCP"
    return Finding("mlx", Severity.FAIL, "the installed MLX has no jaccl backend", remedy)


def _fast_synch(chosen: FastSynch) -> Finding:
    value = "unset" if chosen.value is None else chosen.value
    return Finding("synch", Severity.OK, f"MLX_METAL_FAST_SYNCH for runners: {value} ({chosen.why})")


def _groups(state: Mapping[str, Any] | None) -> list[Finding]:
    """One finding for each cable between two peers of the mesh, as the node on this machine reports."""
    if state is None:
        return [
            Finding(
                "mesh",
                Severity.WARN,
                "no node runs on this machine, so its cables to peers are unknown",
                "exo-mesh serve",
            )
        ]
    names = {peer["id"]: peer["name"] for peer in state["view"]["peers"]}
    findings = []
    for cable in state.get("cables", ()):
        a, b = (names.get(end["peer"], end["peer"][:8]) for end in cable["ends"])
        ports = " - ".join(end["device"] or "no device" for end in cable["ends"])
        level, word = (Severity.OK, "up") if cable["up"] else (Severity.WARN, "down")
        findings.append(Finding("cable", level, f"{a} - {b} ({ports}): RDMA {word}"))
    return findings or [Finding("mesh", Severity.WARN, "no Thunderbolt cable connects two peers of this mesh")]
